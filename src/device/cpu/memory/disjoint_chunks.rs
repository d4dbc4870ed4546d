//! A slice split into chunks of one length that workers write in any order.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// A slice split into chunks of one length; workers write them in any order, each chunk once.
///
/// Used where rows or columns do not match the split of the work: one head of one row, one block of the KV pool.
#[derive(Debug)]
pub struct DisjointChunks<'a, T> {
    base: NonNull<T>,
    piece_len: usize,
    count: usize,
    /// One bit per chunk that has been taken.
    taken: &'a [AtomicU64],
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: a shared `DisjointChunks` returns `&mut` to disjoint chunks only, each to one thread; `T: Send` lets them be
// used there.
unsafe impl<T: Send> Sync for DisjointChunks<'_, T> {}
// SAFETY: `self` is equivalent to a `&mut [T]`, which is `Send` if `T` is.
unsafe impl<T: Send> Send for DisjointChunks<'_, T> {}

impl<'a, T: Copy> DisjointChunks<'a, T> {
    /// Splits `data` into chunks of `piece_len`; a remainder belongs to no chunk. `claims` stores one bit per chunk and
    /// grows as needed.
    pub fn new(data: &'a mut [T], piece_len: usize, claims: &'a mut Vec<AtomicU64>) -> Self {
        let count = data.len() / piece_len;
        let words = count.div_ceil(64);
        if claims.len() < words {
            claims.resize_with(words, AtomicU64::default);
        }
        for word in &mut claims[..words] {
            *word.get_mut() = 0;
        }
        Self { base: NonNull::from(data).cast(), piece_len, count, taken: &claims[..words], life: PhantomData }
    }

    /// Borrows one chunk for writing.
    ///
    /// # Panics
    /// If there is no such chunk or it was taken before.
    #[allow(clippy::mut_from_ref)] // each piece leaves once
    pub fn take(&self, piece: usize) -> &mut [T] {
        assert!(piece < self.count, "piece {piece} of {}", self.count);
        let bit = 1 << (piece % 64);
        let before = self.taken[piece / 64].fetch_or(bit, Ordering::Relaxed);
        assert!(before & bit == 0, "piece {piece} was taken before");
        // SAFETY: the chunk is within the `&'a mut [T]` that `self` was created from, and its bit was clear, so no
        // other reference to it exists.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(piece * self.piece_len).as_ptr(), self.piece_len) }
    }

    /// Copies whole chunks to element `start`, the first element of a chunk.
    ///
    /// # Panics
    /// As [`take`](Self::take), or if `start` or the length is not a multiple of the chunk length.
    pub fn put(&self, start: usize, values: &[T]) {
        assert!(start.is_multiple_of(self.piece_len) && values.len().is_multiple_of(self.piece_len), "whole pieces");
        for (index, values) in values.chunks_exact(self.piece_len).enumerate() {
            self.take(start / self.piece_len + index).copy_from_slice(values);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::thread_pool::ThreadPool;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn each_chunk_is_taken_once() {
        let threads = ThreadPool::new(Some(3)).unwrap();
        let (mut data, mut claims) = (vec![0usize; 203], Vec::new());
        for round in 1..3 {
            let pieces = DisjointChunks::new(&mut data, 2, &mut claims);
            threads.run(&|worker| {
                for piece in (worker.index()..101).step_by(3) {
                    pieces.put(2 * piece, &[round * piece, round]);
                }
            });
            assert!(catch_unwind(AssertUnwindSafe(|| pieces.take(7).len())).is_err());
            assert!(catch_unwind(AssertUnwindSafe(|| pieces.take(101).len())).is_err());
            assert!((0..101).all(|piece| data[2 * piece..][..2] == [round * piece, round]) && data[202] == 0);
        }
    }
}

//! A slice cut into pieces of one length, which members of a team write in any order.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// A slice cut into pieces of one length, which members write in any order, each piece once.
///
/// Where rows or columns do not fit the way work is shared: one head of one row, one block of the KV pool.
#[derive(Debug)]
pub struct DisjointChunks<'a, T> {
    base: NonNull<T>,
    piece_len: usize,
    count: usize,
    /// A bit for each piece taken so far.
    taken: &'a [AtomicU64],
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: a shared `Pieces` hands out `&mut` to disjoint pieces, each to one thread.
unsafe impl<T: Send> Sync for DisjointChunks<'_, T> {}
// SAFETY: it is a `&mut [T]` in other words.
unsafe impl<T: Send> Send for DisjointChunks<'_, T> {}

impl<'a, T: Copy> DisjointChunks<'a, T> {
    /// Cuts `data` into pieces of `piece_len`; what is left over belongs to none. `claims` is room for a bit a piece and
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

    /// One piece, to write.
    ///
    /// # Panics
    /// If there is no such piece or it was taken before.
    #[allow(clippy::mut_from_ref)] // each piece leaves once
    pub fn take(&self, piece: usize) -> &mut [T] {
        assert!(piece < self.count, "piece {piece} of {}", self.count);
        let bit = 1 << (piece % 64);
        let before = self.taken[piece / 64].fetch_or(bit, Ordering::Relaxed);
        assert!(before & bit == 0, "piece {piece} was taken before");
        // SAFETY: the piece lies within the `&'a mut [T]` this was made from, and the bit says that nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(piece * self.piece_len).as_ptr(), self.piece_len) }
    }

    /// Copies whole pieces to element `start`, the first of a piece.
    ///
    /// # Panics
    /// As [`take`](Self::take), or if `start` or the length is no whole number of pieces.
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

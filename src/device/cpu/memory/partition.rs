//! A matrix split into parts that workers write at the same time.
//!
//! Parts are disjoint by construction. A [`Partition`] is split once, at ascending bounds, into one part per worker;
//! each part can be claimed once. The whole can be read only after every claimed [`Tile`] has been dropped; from then
//! on no part can be claimed.
//!
//! ```text
//! Partition::columns   | part 0 | part 1 | part 2 |      Partition::rows   part 0 ──────────
//!               row 0  | ------ | ------ | ------ |                        part 1 ──────────
//!               row 1  | ------ | ------ | ------ |                        part 2 ──────────
//!         order of use:  claim each once ── drop tiles ── barrier ── read() by all
//! ```

#![allow(unsafe_code)]

use crate::device::cpu::thread_pool::{MAX_WORKERS, split};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Bounds of the parts.
#[derive(Clone, Copy, Debug)]
enum Cuts<'a> {
    Even { parts: usize, granule: usize },
    At(&'a [usize]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    Rows,
    Columns,
}

/// A matrix split into parts that workers may write at the same time.
#[derive(Debug)]
pub struct Partition<'a, T> {
    base: NonNull<T>,
    rows: usize,
    cols: usize,
    stride: usize,
    axis: Axis,
    cuts: Cuts<'a>,
    /// One bit per part that has been claimed.
    claimed: [AtomicU64; MAX_WORKERS / 64],
    /// Number of live tiles, and the flag `READING` once the whole is readable.
    state: AtomicU32,
    life: PhantomData<&'a mut [T]>,
}

const READING: u32 = 1 << 31;

// SAFETY: a shared `Partition` returns `&mut` to disjoint parts (requires `T: Send`) and later `&` to the whole
// (requires `T: Sync`).
unsafe impl<T: Send + Sync> Sync for Partition<'_, T> {}
// SAFETY: `self` is equivalent to a `&mut [T]`, which is `Send` if `T` is.
unsafe impl<T: Send> Send for Partition<'_, T> {}

impl<'a, T> Partition<'a, T> {
    fn new(data: &'a mut [T], cols: usize, axis: Axis, cuts: Cuts<'a>) -> Self {
        let rows = data.len().checked_div(cols).unwrap_or(0);
        assert_eq!(data.len(), rows * cols, "a matrix of {cols} columns");
        let extent = if axis == Axis::Rows { rows } else { cols };
        let parts = match cuts {
            Cuts::Even { parts, .. } => parts,
            Cuts::At(bounds) => {
                assert!(bounds.is_sorted() && bounds.last().is_some_and(|&end| end <= extent), "cuts within {extent}");
                bounds.len() - 1
            }
        };
        assert!((1..=MAX_WORKERS).contains(&parts), "{parts} parts");
        Self {
            base: NonNull::from(data).cast(),
            rows,
            cols,
            stride: cols,
            axis,
            cuts,
            claimed: [const { AtomicU64::new(0) }; MAX_WORKERS / 64],
            state: AtomicU32::new(0),
            life: PhantomData,
        }
    }

    /// Splits a row-major matrix of `cols` columns into `parts` parts of whole rows, at multiples of `granule` rows, in
    /// the same way as [`WorkerCtx::span`](crate::device::cpu::thread_pool::WorkerCtx::span).
    pub fn rows(data: &'a mut [T], cols: usize, parts: usize, granule: usize) -> Self {
        Self::new(data, cols, Axis::Rows, Cuts::Even { parts, granule })
    }

    /// Splits a row-major matrix of `cols` columns into `parts` parts of whole columns, at multiples of `granule`
    /// columns.
    pub fn columns(data: &'a mut [T], cols: usize, parts: usize, granule: usize) -> Self {
        Self::new(data, cols, Axis::Columns, Cuts::Even { parts, granule })
    }

    /// Splits at given rows: part `i` is `bounds[i]..bounds[i + 1]`. Bounds ascend; parts may be empty.
    pub fn rows_at(data: &'a mut [T], cols: usize, bounds: &'a [usize]) -> Self {
        Self::new(data, cols, Axis::Rows, Cuts::At(bounds))
    }

    /// Splits at given columns: part `i` is `bounds[i]..bounds[i + 1]`. Bounds ascend; parts may be empty.
    pub fn columns_at(data: &'a mut [T], cols: usize, bounds: &'a [usize]) -> Self {
        Self::new(data, cols, Axis::Columns, Cuts::At(bounds))
    }

    /// Rows or columns of part `part`.
    pub fn range(&self, part: usize) -> Range<usize> {
        match self.cuts {
            Cuts::Even { parts, granule } => {
                assert!(part < parts, "part {part} of {parts}");
                split(if self.axis == Axis::Rows { self.rows } else { self.cols }, granule, parts, part)
            }
            Cuts::At(bounds) => bounds[part]..bounds[part + 1],
        }
    }

    /// Claims part `part` for writing.
    ///
    /// # Panics
    /// If the part was claimed before, or the whole has been read.
    pub fn claim(&self, part: usize) -> Tile<'_, T> {
        let range = self.range(part);
        let bit = 1 << (part % 64);
        let before = self.claimed[part / 64].fetch_or(bit, Ordering::Relaxed);
        assert!(before & bit == 0, "part {part} was claimed before");
        assert!(self.state.fetch_add(1, Ordering::AcqRel) & READING == 0, "claimed after it was read");
        let (offset, rows, cols) = match self.axis {
            Axis::Rows => (range.start * self.stride, range.len(), self.cols),
            Axis::Columns => (range.start, self.rows, range.len()),
        };
        Tile {
            // SAFETY: `range` is within the matrix, so the offset is at most its length.
            base: unsafe { self.base.add(offset) },
            rows,
            cols,
            stride: self.stride,
            first: range.start,
            state: Some(&self.state),
            life: PhantomData,
        }
    }

    /// Borrows the whole matrix for reading; no part can be claimed afterwards. Workers call this after the barrier
    /// that follows their last write.
    ///
    /// # Panics
    /// If a tile has not been dropped.
    pub fn read(&self) -> &[T] {
        let state = self.state.fetch_or(READING, Ordering::AcqRel);
        assert!(state & !READING == 0, "read while it is being written");
        // SAFETY: the memory was a `&'a mut [T]` of this length. Tiles are the only writers: none exists, and `READING`
        // prevents new ones. A tile's writes happen before the `AcqRel` decrement in its drop.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.rows * self.cols) }
    }
}

/// A rectangle of a row-major matrix that one thread may write.
#[derive(Debug)]
pub struct Tile<'t, T> {
    base: NonNull<T>,
    rows: usize,
    cols: usize,
    stride: usize,
    first: usize,
    state: Option<&'t AtomicU32>,
    life: PhantomData<&'t mut [T]>,
}

// SAFETY: a tile is a set of `&mut [T]`, one per row, which are `Send` if `T` is.
unsafe impl<T: Send> Send for Tile<'_, T> {}
// SAFETY: `&Tile` only allows reading rows.
unsafe impl<T: Sync> Sync for Tile<'_, T> {}

impl<'t, T> Tile<'t, T> {
    /// Creates a tile that covers a whole row-major matrix of `cols` columns.
    pub fn whole(data: &'t mut [T], cols: usize) -> Self {
        let rows = data.len().checked_div(cols).unwrap_or(0);
        assert_eq!(data.len(), rows * cols, "a matrix of {cols} columns");
        Self { base: NonNull::from(data).cast(), rows, cols, stride: cols, first: 0, state: None, life: PhantomData }
    }

    /// Number of rows of the tile.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns of the tile.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Number of elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// First row (if split by rows) or column (if split by columns) of the tile in the matrix.
    pub fn first(&self) -> usize {
        self.first
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row's `cols` elements are within the tile, and `&self` excludes writers.
        unsafe { std::slice::from_raw_parts(self.base.add(row * self.stride).as_ptr(), self.cols) }
    }

    /// One row, for writing.
    pub fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: as in `row`; `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.stride).as_ptr(), self.cols) }
    }

    /// Pointer to the first element, for kernels. In row `r`, only elements `r * stride..r * stride + cols` may be
    /// accessed.
    pub(in crate::device::cpu) fn as_mut_ptr(&mut self) -> *mut T {
        self.base.as_ptr()
    }
}

impl<T> Drop for Tile<'_, T> {
    fn drop(&mut self) {
        if let Some(state) = self.state {
            state.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::thread_pool::ThreadPool;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn members_fill_their_parts_and_all_read_the_whole() {
        for count in [1, 2, 3] {
            let threads = ThreadPool::new(Some(count)).unwrap();
            let mut data = vec![0usize; 5 * 50];
            let parts = Partition::columns(&mut data, 50, count, 16);
            threads.run(&|worker| {
                let mut tile = parts.claim(worker.index());
                for row in 0..tile.rows() {
                    let first = tile.first();
                    for (col, value) in tile.row_mut(row).iter_mut().enumerate() {
                        *value = row * 50 + first + col;
                    }
                }
                drop(tile);
                worker.barrier();
                assert!(parts.read().iter().enumerate().all(|(i, &value)| value == i));
            });
        }
    }

    #[test]
    fn claiming_twice_reading_early_and_claiming_late_are_refused() {
        let mut data = [0u8; 12];
        let parts = Partition::rows_at(&mut data, 4, &[0, 1, 1, 3]);
        assert_eq!((parts.range(0), parts.range(1), parts.range(2)), (0..1, 1..1, 1..3));
        let refused = |body: &dyn Fn()| catch_unwind(AssertUnwindSafe(body)).is_err();
        let tile = parts.claim(2);
        assert!((tile.rows(), tile.cols(), tile.first()) == (2, 4, 1));
        assert!(refused(&|| drop(parts.claim(2))));
        assert!(refused(&|| {
            parts.read();
        }));
        drop(tile);
        let mut data = [0u8; 12];
        let parts = Partition::columns(&mut data, 4, 2, 1);
        assert_eq!(parts.read().len(), 12);
        assert!(refused(&|| drop(parts.claim(0))));
        assert!(refused(&|| _ = Partition::rows_at(&mut [0u8; 4], 2, &[0, 3])));
        assert!(refused(&|| _ = Partition::rows_at(&mut [0u8; 4], 2, &[1, 0])));
    }
}

//! Memory of the CPU device: aligned buffers, and views by which members of a team write disjoint pieces of one.
//!
//! Disjointness is by construction, so callers need no `unsafe`: a [`Parts`] is cut once, at ascending bounds, into as
//! many parts as the team has members; a part can be claimed once; and the whole can be read only when every claimed
//! [`Tile`] has been dropped, after which no more can be claimed. Breaking the order is a panic, never a race.
//! This file never grows or moves a buffer.
//!
//! ```text
//! Parts::columns   | part 0 | part 1 | part 2 |      Parts::rows   part 0 ──────────
//!           row 0  | ------ | ------ | ------ |                    part 1 ──────────
//!           row 1  | ------ | ------ | ------ |                    part 2 ──────────
//!     life:  claim each once ── drop tiles ── barrier ── read() by all
//! ```

#![allow(unsafe_code)]

use super::pool::{MAX_MEMBERS, split};
use crate::device::DeviceError;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A cache line and an AVX-512 register.
pub const ALIGNMENT: usize = 64;
/// From here on a buffer is mapped directly and backed by huge pages where the system has them: 28 instead of 25 GB/s.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed bytes at an address that is a multiple of 64. Large ones are untouched pages until written, so that the threads
/// that fill them bring them in.
#[derive(Debug)]
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    /// What to give back; the mapping of a large buffer is longer than the buffer.
    mapping: Option<(NonNull<u8>, usize)>,
}

// SAFETY: the buffer is owned memory without interior mutability.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above; `&AlignedBytes` only reads.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zero bytes, or a typed error if the system has no room for them.
    pub fn zeroed(len: usize) -> Result<Self, DeviceError> {
        if len == 0 {
            return Ok(Self { start: NonNull::<Aligned>::dangling().cast(), len, mapping: None });
        }
        let refused =
            || DeviceError::OutOfMemory { kind: "host", asked_bytes: len as u64, free_bytes: available_bytes() };
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE {
            return Self::mapped(len).ok_or_else(refused);
        }
        let layout = Layout::from_size_align(len, ALIGNMENT).map_err(|_| refused())?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
        Ok(Self { start, len, mapping: None })
    }

    #[cfg(target_os = "linux")]
    fn mapped(len: usize) -> Option<Self> {
        let mapped = len.checked_add(HUGE_PAGE)?.checked_next_multiple_of(4096)?;
        // SAFETY: an anonymous private mapping at an address of the system's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = NonNull::new(base.cast::<u8>())?;
        let skip = base.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: `skip` < HUGE_PAGE, so the start and its `len` bytes lie within the mapping.
        let start = unsafe { base.add(skip) };
        // SAFETY: the range lies within the mapping. Huge pages are a wish: a refusal changes speed only.
        unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        Some(Self { start, len, mapping: Some((base, mapped)) })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` is valid for `len` initialised (zeroed) bytes for as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as `as_slice`, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Ranges of one buffer lent out side by side: any number to read, or one to write, of every byte. What is lent stays
/// lent for the life of the whole; asking for more than may be had is answered with `None`.
#[derive(Debug)]
pub struct Loans<'a> {
    start: NonNull<u8>,
    len: usize,
    out: RefCell<Lent>,
    life: PhantomData<&'a mut [u8]>,
}

/// Ranges out so far. There is one of these for each buffer of each group of steps: what is not used is not touched.
#[derive(Debug)]
struct Lent {
    ranges: [MaybeUninit<Loan>; MAX_LOANS],
    count: usize,
}

#[derive(Clone, Copy, Debug)]
struct Loan {
    start: usize,
    end: usize,
    may_write: bool,
}

/// Ranges that can be out at a time: operands of as many steps as a plan runs side by side.
const MAX_LOANS: usize = 64;

impl<'a> Loans<'a> {
    /// Nothing is lent yet.
    pub fn new(bytes: &'a mut [u8]) -> Self {
        let len = bytes.len();
        let out = RefCell::new(Lent { ranges: [const { MaybeUninit::uninit() }; MAX_LOANS], count: 0 });
        Self { start: NonNull::from(bytes).cast(), len, out, life: PhantomData }
    }

    /// A range to read.
    pub fn read(&self, range: Range<usize>) -> Option<&'a [u8]> {
        let start = self.lend(&range, false)?;
        // SAFETY: the range lies within the `&'a mut [u8]` this was made from, and no range that may be written meets it:
        // `lend` has looked, and remembers it for as long as any can be asked for.
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), range.len()) })
    }

    /// A range to write.
    #[allow(clippy::mut_from_ref)] // every byte leaves once
    pub fn write(&self, range: Range<usize>) -> Option<&'a mut [u8]> {
        let start = self.lend(&range, true)?;
        // SAFETY: as in `read`, and no other range at all meets it.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), range.len()) })
    }

    fn lend(&self, range: &Range<usize>, write: bool) -> Option<NonNull<u8>> {
        let Lent { ranges, count } = &mut *self.out.borrow_mut();
        let apart = |other: &Loan| {
            range.is_empty() || other.start == other.end || range.end <= other.start || other.end <= range.start
        };
        let inside = range.start <= range.end && range.end <= self.len;
        // SAFETY: the first `count` are written before `count` says so.
        let out = ranges[..*count].iter().map(|loan| unsafe { loan.assume_init_ref() });
        let free = out.into_iter().all(|other| apart(other) || !(write || other.may_write));
        if !inside || !free || *count == MAX_LOANS {
            return None;
        }
        ranges[*count].write(Loan { start: range.start, end: range.end, may_write: write });
        *count += 1;
        // SAFETY: `range.start` is at most the buffer's length.
        Some(unsafe { self.start.add(range.start) })
    }
}

/// Gives empty buffers an aligned address.
#[repr(align(64))]
struct Aligned;

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        match self.mapping {
            #[cfg(target_os = "linux")]
            Some((base, mapped)) => {
                // SAFETY: exactly the mapping made in `mapped`; nothing borrows it any more.
                unsafe { libc::munmap(base.as_ptr().cast(), mapped) };
            }
            _ if self.len > 0 => {
                // SAFETY: allocated in `zeroed` with this layout, whose validity was checked there.
                unsafe { dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.len, ALIGNMENT)) };
            }
            _ => {}
        }
    }
}

/// Memory the system could still give, for the error message; 0 if it does not say.
pub(super) fn available_bytes() -> u64 {
    let Ok(text) = std::fs::read_to_string("/proc/meminfo") else { return 0 };
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}

/// Where a matrix is cut.
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

/// A matrix cut into parts that members of a team may write at the same time.
#[derive(Debug)]
pub struct Parts<'a, T> {
    base: NonNull<T>,
    rows: usize,
    cols: usize,
    stride: usize,
    axis: Axis,
    cuts: Cuts<'a>,
    /// A bit for each part claimed so far.
    claimed: [AtomicU64; MAX_MEMBERS / 64],
    /// Tiles alive, and `READING` once the whole is readable.
    state: AtomicU32,
    life: PhantomData<&'a mut [T]>,
}

const READING: u32 = 1 << 31;

// SAFETY: a shared `Parts` hands out `&mut` to disjoint parts (needs `T: Send`) and later `&` to all (needs `T: Sync`).
unsafe impl<T: Send + Sync> Sync for Parts<'_, T> {}
// SAFETY: it is a `&mut [T]` in other words.
unsafe impl<T: Send> Send for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
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
        assert!((1..=MAX_MEMBERS).contains(&parts), "{parts} parts");
        Self {
            base: NonNull::from(data).cast(),
            rows,
            cols,
            stride: cols,
            axis,
            cuts,
            claimed: [const { AtomicU64::new(0) }; MAX_MEMBERS / 64],
            state: AtomicU32::new(0),
            life: PhantomData,
        }
    }

    /// Cuts a row-major matrix of `cols` columns into `parts` of whole rows, at multiples of `granule` rows: the split of
    /// [`Member::span`](super::pool::Member::span).
    pub fn rows(data: &'a mut [T], cols: usize, parts: usize, granule: usize) -> Self {
        Self::new(data, cols, Axis::Rows, Cuts::Even { parts, granule })
    }

    /// Cuts a row-major matrix of `cols` columns into `parts` of columns, at multiples of `granule` columns.
    pub fn columns(data: &'a mut [T], cols: usize, parts: usize, granule: usize) -> Self {
        Self::new(data, cols, Axis::Columns, Cuts::Even { parts, granule })
    }

    /// Cuts at given rows: part `i` is `bounds[i]..bounds[i + 1]`. Bounds ascend; parts may be empty.
    pub fn rows_at(data: &'a mut [T], cols: usize, bounds: &'a [usize]) -> Self {
        Self::new(data, cols, Axis::Rows, Cuts::At(bounds))
    }

    /// Cuts at given columns: part `i` is `bounds[i]..bounds[i + 1]`. Bounds ascend; parts may be empty.
    pub fn columns_at(data: &'a mut [T], cols: usize, bounds: &'a [usize]) -> Self {
        Self::new(data, cols, Axis::Columns, Cuts::At(bounds))
    }

    /// The rows or columns of part `part`.
    pub fn range(&self, part: usize) -> Range<usize> {
        match self.cuts {
            Cuts::Even { parts, granule } => {
                assert!(part < parts, "part {part} of {parts}");
                split(if self.axis == Axis::Rows { self.rows } else { self.cols }, granule, parts, part)
            }
            Cuts::At(bounds) => bounds[part]..bounds[part + 1],
        }
    }

    /// Part `part`, to write.
    ///
    /// # Panics
    /// If it was claimed before, or the whole has been read.
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
            // SAFETY: `range` lies within the matrix, so the offset is at most its length.
            base: unsafe { self.base.add(offset) },
            rows,
            cols,
            stride: self.stride,
            first: range.start,
            state: Some(&self.state),
            life: PhantomData,
        }
    }

    /// All of it, to read, once no tile is alive; nothing can be claimed afterwards. Members call this after the barrier
    /// behind their last write.
    ///
    /// # Panics
    /// If a tile is still alive.
    pub fn read(&self) -> &[T] {
        let state = self.state.fetch_or(READING, Ordering::AcqRel);
        assert!(state & !READING == 0, "read while it is being written");
        // SAFETY: the memory was a `&'a mut [T]` of this length. Tiles are the only writers: none is alive, and `READING`
        // keeps new ones out. A tile's writes happen before the `AcqRel` decrement in its drop.
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

// SAFETY: a tile is a set of `&mut [T]`, one a row.
unsafe impl<T: Send> Send for Tile<'_, T> {}
// SAFETY: through `&Tile` rows can only be read.
unsafe impl<T: Sync> Sync for Tile<'_, T> {}

impl<'t, T> Tile<'t, T> {
    /// All of a row-major matrix of `cols` columns.
    pub fn whole(data: &'t mut [T], cols: usize) -> Self {
        let rows = data.len().checked_div(cols).unwrap_or(0);
        assert_eq!(data.len(), rows * cols, "a matrix of {cols} columns");
        Self { base: NonNull::from(data).cast(), rows, cols, stride: cols, first: 0, state: None, life: PhantomData }
    }

    /// Rows of the tile.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the tile.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from a row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The matrix's row (if cut by rows) or column (if cut by columns) where the tile begins.
    pub fn first(&self) -> usize {
        self.first
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row's `cols` elements lie within the tile, which only `self` may write.
        unsafe { std::slice::from_raw_parts(self.base.add(row * self.stride).as_ptr(), self.cols) }
    }

    /// One row, to write.
    pub fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: as `row`, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.stride).as_ptr(), self.cols) }
    }

    /// For kernels: row `r`'s elements are valid at `r * stride..r * stride + cols`, nothing else is.
    pub(super) fn as_mut_ptr(&mut self) -> *mut T {
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

/// A slice cut into pieces of one length, which members write in any order, each piece once.
///
/// Where rows or columns do not fit the way work is shared: one head of one row, one block of the KV pool.
#[derive(Debug)]
pub struct Pieces<'a, T> {
    base: NonNull<T>,
    piece_len: usize,
    count: usize,
    /// A bit for each piece taken so far.
    taken: &'a [AtomicU64],
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: a shared `Pieces` hands out `&mut` to disjoint pieces, each to one thread.
unsafe impl<T: Send> Sync for Pieces<'_, T> {}
// SAFETY: it is a `&mut [T]` in other words.
unsafe impl<T: Send> Send for Pieces<'_, T> {}

impl<'a, T: Copy> Pieces<'a, T> {
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
    use super::super::pool::Team;
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn buffers_are_aligned_zeroed_and_writable_to_the_end() {
        for len in [0, 1, 63, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5] {
            let mut bytes = AlignedBytes::zeroed(len).unwrap();
            assert_eq!(bytes.as_slice().as_ptr().align_offset(ALIGNMENT), 0);
            assert!(bytes.len() == len && bytes.as_slice().iter().all(|&byte| byte == 0));
            bytes.as_mut_slice().fill(7);
            assert!(bytes.as_slice().iter().all(|&byte| byte == 7));
        }
    }

    #[test]
    fn too_much_is_a_typed_error() {
        for len in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let error = AlignedBytes::zeroed(len).unwrap_err();
            assert!(matches!(error, DeviceError::OutOfMemory { asked_bytes, .. } if asked_bytes == len as u64));
        }
    }

    #[test]
    fn loans_are_shared_to_read_and_single_to_write() {
        let mut bytes = AlignedBytes::zeroed(64).unwrap();
        let loans = Loans::new(bytes.as_mut_slice());
        let (first, again) = (loans.read(0..16).unwrap(), loans.read(8..16).unwrap());
        let (third, fourth) = (loans.write(16..32).unwrap(), loans.write(48..64).unwrap());
        third.fill(1);
        fourth.fill(2);
        assert!(first.iter().chain(again).all(|&byte| byte == 0));
        assert!(loans.write(15..17).is_none() && loans.read(31..33).is_none() && loans.write(16..32).is_none());
        assert!(loans.read(0..65).is_none() && loans.write(60..70).is_none());
        assert!(loans.write(20..20).is_some(), "an empty range meets nothing");
        assert_eq!(loans.write(32..48).map(|free| free.len()), Some(16));
        assert_eq!(bytes.as_slice().iter().map(|&byte| usize::from(byte)).sum::<usize>(), 16 + 32);
        let loans = Loans::new(bytes.as_mut_slice());
        assert!((0..MAX_LOANS).all(|_| loans.read(0..1).is_some()) && loans.read(0..1).is_none());
    }

    #[test]
    fn members_fill_their_parts_and_all_read_the_whole() {
        for count in [1, 2, 3] {
            let team = Team::new(Some(count)).unwrap();
            let mut data = vec![0usize; 5 * 50];
            let parts = Parts::columns(&mut data, 50, count, 16);
            team.run(&|member| {
                let mut tile = parts.claim(member.index());
                for row in 0..tile.rows() {
                    let first = tile.first();
                    for (col, value) in tile.row_mut(row).iter_mut().enumerate() {
                        *value = row * 50 + first + col;
                    }
                }
                drop(tile);
                member.barrier();
                assert!(parts.read().iter().enumerate().all(|(i, &value)| value == i));
            });
        }
    }

    #[test]
    fn pieces_are_taken_once_by_whoever_comes() {
        let team = Team::new(Some(3)).unwrap();
        let (mut data, mut claims) = (vec![0usize; 203], Vec::new());
        for round in 1..3 {
            let pieces = Pieces::new(&mut data, 2, &mut claims);
            team.run(&|member| {
                for piece in (member.index()..101).step_by(3) {
                    pieces.put(2 * piece, &[round * piece, round]);
                }
            });
            assert!(catch_unwind(AssertUnwindSafe(|| pieces.take(7).len())).is_err());
            assert!(catch_unwind(AssertUnwindSafe(|| pieces.take(101).len())).is_err());
            assert!((0..101).all(|piece| data[2 * piece..][..2] == [round * piece, round]) && data[202] == 0);
        }
    }

    #[test]
    fn claiming_twice_reading_early_and_claiming_late_are_refused() {
        let mut data = [0u8; 12];
        let parts = Parts::rows_at(&mut data, 4, &[0, 1, 1, 3]);
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
        let parts = Parts::columns(&mut data, 4, 2, 1);
        assert_eq!(parts.read().len(), 12);
        assert!(refused(&|| drop(parts.claim(0))));
        assert!(refused(&|| _ = Parts::rows_at(&mut [0u8; 4], 2, &[0, 3])));
        assert!(refused(&|| _ = Parts::rows_at(&mut [0u8; 4], 2, &[1, 0])));
    }
}

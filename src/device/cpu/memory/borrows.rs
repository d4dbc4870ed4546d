//! Disjoint borrows of ranges of one buffer by steps that run together.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;

/// Borrows of ranges of one buffer: each byte has any number of readers or one writer. A range stays borrowed until the
/// whole value is dropped. A request that conflicts with an earlier one returns `None`.
#[derive(Debug)]
pub struct ArenaBorrows<'a> {
    start: NonNull<u8>,
    len: usize,
    out: RefCell<BorrowList>,
    life: PhantomData<&'a mut [u8]>,
}

/// Ranges borrowed so far. Each buffer of each group of steps has a list of its own; unused entries are never touched.
#[derive(Debug)]
struct BorrowList {
    ranges: [MaybeUninit<Borrow>; MAX_BORROWS],
    count: usize,
}

#[derive(Clone, Copy, Debug)]
struct Borrow {
    start: usize,
    end: usize,
    may_write: bool,
}

/// Largest number of borrowed ranges: operands of as many steps as a plan runs in parallel.
const MAX_BORROWS: usize = 64;

impl<'a> ArenaBorrows<'a> {
    /// Starts with no range borrowed.
    pub fn new(bytes: &'a mut [u8]) -> Self {
        let len = bytes.len();
        let out = RefCell::new(BorrowList { ranges: [const { MaybeUninit::uninit() }; MAX_BORROWS], count: 0 });
        Self { start: NonNull::from(bytes).cast(), len, out, life: PhantomData }
    }

    /// Borrows a range for reading.
    pub fn read(&self, range: Range<usize>) -> Option<&'a [u8]> {
        let start = self.borrow(&range, false)?;
        // SAFETY: the range is within the `&'a mut [u8]` that `self` was created from. `lend` has checked that no range
        // borrowed for writing overlaps it, and records it for the life of `self`.
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), range.len()) })
    }

    /// Borrows a range for writing.
    #[allow(clippy::mut_from_ref)] // every byte leaves once
    pub fn write(&self, range: Range<usize>) -> Option<&'a mut [u8]> {
        let start = self.borrow(&range, true)?;
        // SAFETY: as in `read`, and no other borrowed range overlaps it.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), range.len()) })
    }

    fn borrow(&self, range: &Range<usize>, write: bool) -> Option<NonNull<u8>> {
        let BorrowList { ranges, count } = &mut *self.out.borrow_mut();
        let apart = |other: &Borrow| {
            range.is_empty() || other.start == other.end || range.end <= other.start || other.end <= range.start
        };
        let inside = range.start <= range.end && range.end <= self.len;
        // SAFETY: the first `count` entries are initialized before `count` is incremented.
        let out = ranges[..*count].iter().map(|loan| unsafe { loan.assume_init_ref() });
        let free = out.into_iter().all(|other| apart(other) || !(write || other.may_write));
        if !inside || !free || *count == MAX_BORROWS {
            return None;
        }
        ranges[*count].write(Borrow { start: range.start, end: range.end, may_write: write });
        *count += 1;
        // SAFETY: `range.start` is at most the buffer's length.
        Some(unsafe { self.start.add(range.start) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::memory::AlignedBytes;

    #[test]
    fn loans_are_shared_to_read_and_single_to_write() {
        let mut bytes = AlignedBytes::zeroed(64).unwrap();
        let borrows = ArenaBorrows::new(bytes.as_mut_slice());
        let (first, again) = (borrows.read(0..16).unwrap(), borrows.read(8..16).unwrap());
        let (third, fourth) = (borrows.write(16..32).unwrap(), borrows.write(48..64).unwrap());
        third.fill(1);
        fourth.fill(2);
        assert!(first.iter().chain(again).all(|&byte| byte == 0));
        assert!(borrows.write(15..17).is_none() && borrows.read(31..33).is_none() && borrows.write(16..32).is_none());
        assert!(borrows.read(0..65).is_none() && borrows.write(60..70).is_none());
        assert!(borrows.write(20..20).is_some(), "an empty range meets nothing");
        assert_eq!(borrows.write(32..48).map(|free| free.len()), Some(16));
        assert_eq!(bytes.as_slice().iter().map(|&byte| usize::from(byte)).sum::<usize>(), 16 + 32);
        let borrows = ArenaBorrows::new(bytes.as_mut_slice());
        assert!((0..MAX_BORROWS).all(|_| borrows.read(0..1).is_some()) && borrows.read(0..1).is_none());
    }
}

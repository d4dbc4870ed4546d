//! Functions of one or two vectors applied along slices, on any instruction set.

use crate::device::cpu::simd::vector::SimdVector;

/// A function of one vector. A trait instead of a closure: a closure is compiled as a function of its own, without the
/// target features of the kernel around it, and if it is not inlined, every operation in it becomes a call.
pub(crate) trait Map {
    /// `f(x)`.
    fn map<L: SimdVector>(&self, l: L, x: L::F32) -> L::F32;
}

/// A function of two vectors; a trait for the same reason as [`Map`].
pub(crate) trait Zip {
    /// `f(x, y)`.
    fn zip<L: SimdVector>(&self, l: L, x: L::F32, y: L::F32) -> L::F32;
}

/// Applies `f` to each vector of `row` in place.
#[inline(always)]
pub(crate) fn map_in_place<L: SimdVector>(l: L, row: &mut [f32], f: &impl Map) {
    let (chunks, tail) = row.as_chunks_mut::<16>();
    for chunk in chunks {
        let y = f.map(l, l.load(chunk));
        l.store(y, chunk);
    }
    if !tail.is_empty() {
        let mut padded = [0.0; 16];
        padded[..tail.len()].copy_from_slice(tail);
        let y = f.map(l, l.load(&padded));
        l.store(y, &mut padded);
        tail.copy_from_slice(&padded[..tail.len()]);
    }
}

/// `out = f(a, b)`, vector by vector; the three rows have the same length.
#[inline(always)]
pub(crate) fn zip<L: SimdVector>(l: L, a: &[f32], b: &[f32], out: &mut [f32], f: &impl Zip) {
    debug_assert!(a.len() == out.len() && b.len() == out.len(), "rows of one operation have one length");
    let (a_chunks, a_tail) = a.as_chunks::<16>();
    let (b_chunks, b_tail) = b.as_chunks::<16>();
    let (chunks, tail) = out.as_chunks_mut::<16>();
    for ((x, y), chunk) in a_chunks.iter().zip(b_chunks).zip(chunks) {
        let z = f.zip(l, l.load(x), l.load(y));
        l.store(z, chunk);
    }
    if !tail.is_empty() {
        let z = f.zip(l, l.load(&padded(a_tail)), l.load(&padded(b_tail)));
        let mut last = [0.0; 16];
        l.store(z, &mut last);
        tail.copy_from_slice(&last[..tail.len()]);
    }
}

/// Up to 16 elements, padded with zeros.
#[inline(always)]
pub(crate) fn padded(tail: &[f32]) -> [f32; 16] {
    let mut out = [0.0; 16];
    out[..tail.len()].copy_from_slice(tail);
    out
}

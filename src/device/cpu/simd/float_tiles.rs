//! How a product of float rows is cut into tiles. Either one row at a time over weights as stored, all of K at once; or
//! groups of panels, pieces of K, perhaps widened into a buffer, then all rows, tallest tiles first.
//!
//! The order of one output value's additions is K's, whatever the cuts.

#![allow(unsafe_code)]

use crate::device::cpu::kernels::float_rows::{Activation, FloatRows, columns_of};
use crate::device::cpu::memory::Tile;
use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use crate::weights::DType;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Panels whose pieces all rows pass over together: copying the activations of a tile is shared by all of them.
const GROUP: usize = 8;
/// K of a widened piece: a tile's activations (6 KiB) and two panels (16 KiB) stay in the first-level cache.
const PIECE: usize = 128;
/// K of a piece that is read as stored, two bytes a value.
#[cfg(target_arch = "x86_64")]
const HALF_PIECE: usize = 2 * PIECE;
/// K of a piece of a row that is widened by itself: 8 KiB.
const ROW_PIECE: usize = 2048;
/// How far ahead of its use a weight is asked for when it is read as stored.
const AHEAD_BYTES: usize = 8192;
/// Rows of the tallest tile that any path has.
const TALL: usize = 12;
/// Bytes from a row to the next in a copied tile: an odd number of cache lines, so that rows do not meet in one set of the
/// cache, as those of a matrix do when K is a multiple of 1,024.
const COPY_STRIDE: usize = 4 * PIECE + 64;

/// Widened weights: 64 KiB, in the second-level cache. Not initialized: a piece is written before it is read.
#[repr(align(64))]
struct Widened(MaybeUninit<[f32; GROUP * PIECE * PANEL]>);

/// Activations of a tile, likewise.
#[repr(align(64))]
struct Copied(MaybeUninit<[u8; TALL * COPY_STRIDE]>);

/// How rows are given, and how bodies read them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Given {
    F32,
    /// bfloat16, read as f32: through a copy.
    Widened,
    /// bfloat16, read as it is.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Pairs,
}

impl Given {
    const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Widened | Self::Pairs => 2,
        }
    }
}

/// What a tile works on: a piece of K, pointers to the tile's first row and panel.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) x: *const u8,
    /// Bytes from a row to the next.
    pub(super) x_stride: usize,
    pub(super) given: Given,
    pub(super) w: *const u8,
    /// Bytes from a panel to the next.
    pub(super) w_stride: usize,
    pub(super) depth: usize,
    pub(super) out: *mut f32,
    pub(super) stride: usize,
    /// Output columns from the tile's first on.
    pub(super) cols: usize,
    /// Whether the sums start here, or go on from `out`.
    pub(super) start: bool,
    /// Null, or the tile's first bias, if the sums end here.
    pub(super) bias: *const f32,
    /// Null, or what is to be asked for ahead of time: addresses for the first panel, bytes to the next panel and k.
    pub(super) ahead: *const u8,
    pub(super) ahead_panel: usize,
    pub(super) ahead_step: usize,
}

impl Job {
    /// The whole product, for bodies that read f32; none if it is empty.
    pub(super) fn new<T: Activation>(
        x: FloatRows<'_, T>,
        w: &PackedMatrix,
        bias: Option<&[f32]>,
        panels: &Range<usize>,
        out: &mut Tile<'_, f32>,
    ) -> Option<Self> {
        let columns = columns_of(w, panels);
        if columns.is_empty() || x.rows() == 0 {
            return None;
        }
        // Pairs of k have room for a last one that is not there.
        let depth = if w.dtype() == DType::BF16 { w.k().next_multiple_of(2) } else { w.k() };
        Some(Self {
            x: x.data().as_ptr().cast(),
            x_stride: x.stride() * size_of::<T>(),
            given: if T::IS_BF16 { Given::Widened } else { Given::F32 },
            w: w.panel(panels.start).as_ptr(),
            w_stride: w.panel_bytes(),
            depth: w.k(),
            stride: out.stride(),
            out: out.as_mut_ptr(),
            cols: columns.len(),
            start: true,
            bias: bias.map_or(std::ptr::null(), |bias| bias[columns.start..].as_ptr()),
            ahead: std::ptr::null(),
            ahead_panel: w.panel_bytes(),
            ahead_step: w.panel_bytes() / depth,
        })
    }

    /// The same for bodies that read pairs of bfloat16.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn pairs(self) -> Self {
        debug_assert!(self.given == Given::Widened, "rows of bfloat16");
        Self { given: Given::Pairs, ..self }
    }

    /// The same, some rows further down and panels further right.
    unsafe fn at(self, rows: usize, panels: usize) -> Self {
        // SAFETY: the caller stays within the rows and panels of the job.
        unsafe {
            Self {
                x: self.x.add(rows * self.x_stride),
                w: self.w.add(panels * self.w_stride),
                out: self.out.add(rows * self.stride + panels * PANEL),
                cols: self.cols - panels * PANEL,
                bias: if self.bias.is_null() { self.bias } else { self.bias.add(panels * PANEL) },
                ahead: if self.ahead.is_null() {
                    self.ahead
                } else {
                    self.ahead.wrapping_add(panels * self.ahead_panel)
                },
                ..self
            }
        }
    }

    /// A piece of K of it. The weights stay where they are.
    unsafe fn piece(self, k: Range<usize>) -> Self {
        Self {
            // SAFETY: the caller stays within the depth of the job.
            x: unsafe { self.x.add(k.start * self.given.bytes()) },
            depth: k.len(),
            start: k.start == 0,
            bias: if k.end == self.depth { self.bias } else { std::ptr::null() },
            ..self
        }
    }

    /// Writes some rows of the piece, as bodies read them, to `copy`, and makes them the job's.
    #[allow(clippy::cast_ptr_alignment)] // rows of bfloat16 are slices of u16, and copies begin at cache lines or floats
    unsafe fn copied(mut self, rows: usize, copy: *mut u8) -> Self {
        for r in 0..rows {
            // SAFETY: the rows are the job's; the caller has room for them.
            unsafe {
                let (from, to) = (self.x.add(r * self.x_stride), copy.add(r * COPY_STRIDE));
                if self.given == Given::Widened {
                    let (from, to) = (from.cast::<u16>(), to.cast::<f32>());
                    for k in 0..self.depth {
                        *to.add(k) = f32::from_bits(u32::from(*from.add(k)) << 16);
                    }
                } else {
                    std::ptr::copy_nonoverlapping(from, to, self.depth * self.given.bytes());
                }
            }
        }
        (self.x, self.x_stride) = (copy, COPY_STRIDE);
        self
    }
}

/// One tile's body.
pub(super) type Body = unsafe fn(Job);

/// The bodies for some number of rows: over how many panels the wide one goes, the wide one, the one for a single panel.
pub(super) type Bodies = (usize, Body, Body);

/// Bodies by their number of rows, tallest first, down to one row.
pub(super) type AllBodies = [(usize, Bodies)];

/// Widens some k of a panel to 16 values each.
pub(super) type Widen = unsafe fn(*const u8, Range<usize>, *mut f32);

/// From this many rows on a piece of K is passed over by all of them: float weights are then widened once for all.
pub(super) const PIECES_FROM_ROWS: usize = 3;

/// What a path has for one type of weights.
pub(super) struct Kernels {
    /// Bodies over widened weights.
    pub(super) bodies: &'static AllBodies,
    /// Those of one row over weights as they are stored, if there are any.
    pub(super) row: Option<Bodies>,
    pub(super) widen: Widen,
}

/// `panels` of `w` times all rows of `x`, shapes as the caller has checked them.
///
/// # Safety
/// The kernels are for the type of `w`; the machine has what they need.
pub(super) unsafe fn multiply<T: Activation>(
    kernels: &Kernels,
    x: FloatRows<'_, T>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    let (rows, Some(job)) = (x.rows(), Job::new(x, w, bias, &panels, out)) else { return };
    // SAFETY: `job` covers all rows and the panels; the rest is the caller's.
    unsafe {
        match kernels.row {
            Some(row) if rows < PIECES_FROM_ROWS => as_stored(row, job, rows, panels.len()),
            _ => widened(kernels.bodies, kernels.widen, job, rows, panels.len()),
        }
    }
}

/// One row at a time over weights as they are stored, all of K at once.
///
/// # Safety
/// The job covers the rows and panels, stored as the bodies read them; the machine has what the bodies need.
pub(super) unsafe fn as_stored(bodies: Bodies, job: Job, rows: usize, panels: usize) {
    let wide = bodies.0;
    let mut copy = MaybeUninit::<[f32; ROW_PIECE]>::uninit();
    let piece = if job.given == Given::Widened { ROW_PIECE } else { job.depth };
    for first in (0..panels).step_by(wide) {
        for row in 0..rows {
            for k in (0..job.depth).step_by(piece) {
                // SAFETY: within the rows, panels and depth of the job; a piece of a row fits the copy.
                unsafe {
                    let mut part = job.at(row, first).piece(k..(k + piece).min(job.depth));
                    part.w = part.w.add(k * job.ahead_step);
                    if row == 0 {
                        part.ahead = part.w.wrapping_add(AHEAD_BYTES);
                    }
                    if job.given == Given::Widened {
                        part = part.copied(1, copy.as_mut_ptr().cast());
                    }
                    over_panels(part, wide.min(panels - first), bodies);
                }
            }
        }
    }
}

/// Widens a piece of K of a group of panels, then passes all rows over it: the bodies read f32.
///
/// # Safety
/// As [`as_stored`], with weights as `widen` reads them.
unsafe fn widened(bodies: &AllBodies, widen: Widen, job: Job, rows: usize, panels: usize) {
    let mut values = Widened(MaybeUninit::uninit());
    let mut widen_group = |source: Job, group: usize, k: Range<usize>| {
        let to = values.0.as_mut_ptr().cast::<f32>();
        for p in 0..group {
            // SAFETY: within the panels and depth of the job; `GROUP` panels of `PIECE` fill the buffer exactly.
            unsafe { widen(source.w.add(p * job.w_stride), k.clone(), to.add(p * PIECE * PANEL)) };
        }
        (to.cast_const().cast(), PIECE * PANEL * 4)
    };
    // SAFETY: the caller's.
    unsafe { in_pieces(bodies, PIECE, &mut widen_group, job, rows, panels) }
}

/// The same over weights of two bytes as they are stored.
///
/// # Safety
/// As [`as_stored`].
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn halves(bodies: &AllBodies, job: Job, rows: usize, panels: usize) {
    let mut in_place = |source: Job, _: usize, k: Range<usize>| {
        // SAFETY: within the depth of the job.
        (unsafe { source.w.add(k.start * job.ahead_step) }, job.w_stride)
    };
    // SAFETY: the caller's.
    unsafe { in_pieces(bodies, HALF_PIECE, &mut in_place, job, rows, panels) }
}

/// `weights` gives where a piece of a group's panels is, and the bytes from a panel to the next there.
unsafe fn in_pieces(
    bodies: &AllBodies,
    piece: usize,
    weights: &mut dyn FnMut(Job, usize, Range<usize>) -> (*const u8, usize),
    job: Job,
    rows: usize,
    panels: usize,
) {
    assert!(bodies.iter().all(|(height, _)| *height <= TALL), "the copy holds {TALL} rows");
    let mut copy = Copied(MaybeUninit::uninit());
    for first in (0..panels).step_by(GROUP) {
        let group = GROUP.min(panels - first);
        for k in (0..job.depth).step_by(piece) {
            let end = (k + piece).min(job.depth);
            // SAFETY: within the rows, panels and depth of the job.
            unsafe {
                let source = job.at(0, first);
                let (w, w_stride) = weights(source, group, k..end);
                // The next piece of these panels, or the first of the next group.
                let next = if end < job.depth { end * job.ahead_step } else { group * job.w_stride };
                let ahead = source.w.wrapping_add(next);
                all_rows(bodies, Job { w, w_stride, ahead, ..source.piece(k..end) }, rows, group, &mut copy);
            }
        }
    }
}

/// All rows over a piece, the first of them asking for the next piece.
unsafe fn all_rows(bodies: &AllBodies, mut job: Job, rows: usize, panels: usize, copy: &mut Copied) {
    let mut row = 0;
    for &(height, body) in bodies {
        while rows - row >= height {
            // SAFETY: rows and panels of the tile are within the job's; `height` rows of a piece fit the copy.
            unsafe {
                let mut tile = job.at(row, 0);
                if height > 3 || job.given == Given::Widened {
                    tile = tile.copied(height, copy.0.as_mut_ptr().cast());
                }
                over_panels(tile, panels, body);
            }
            row += height;
            job.ahead = std::ptr::null();
        }
    }
}

/// One tile of rows over some panels.
unsafe fn over_panels(job: Job, panels: usize, (width, wide, single): Bodies) {
    let mut panel = 0;
    // SAFETY: panels of the tile are within the job's.
    unsafe {
        while panels - panel >= width {
            wide(job.at(0, panel));
            panel += width;
        }
        while panel < panels {
            single(job.at(0, panel));
            panel += 1;
        }
    }
}

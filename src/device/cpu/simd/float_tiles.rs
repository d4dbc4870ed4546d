//! Tiling of products of float rows. One row at a time reads weights as stored, over all of K. More rows process groups
//! of panels and pieces of K, convert the weights to f32 in a buffer if needed, and then pass all rows over the piece,
//! tallest tiles first.
//!
//! The additions of one output value are in K order, whatever the tiling.

#![allow(unsafe_code)]

use crate::device::cpu::kernels::float_rows::{Activation, FloatRows, columns_of};
use crate::device::cpu::memory::Tile;
use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use crate::weights::DType;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Number of panels in a group, over whose pieces all rows pass together; they share one copy of a tile's activations.
const GROUP: usize = 8;
/// K of a piece that is converted to f32: a tile's activations (6 KiB) and two panels (16 KiB) stay in the L1 cache.
const PIECE: usize = 128;
/// K of a piece that is read as stored, two bytes per value.
#[cfg(target_arch = "x86_64")]
const HALF_PIECE: usize = 2 * PIECE;
/// K of a piece of a single row whose activations are converted to f32: 8 KiB.
const ROW_PIECE: usize = 2048;
/// Prefetch distance of weights that are read as stored.
const AHEAD_BYTES: usize = 8192;
/// Number of rows of the tallest tile of any path.
const TALL: usize = 12;
/// Bytes from one row to the next in a copied tile: an odd number of cache lines, so that rows do not map to the same
/// cache set, as they do in a matrix whose K is a multiple of 1,024.
const COPY_STRIDE: usize = 4 * PIECE + 64;

/// Weights converted to f32: 64 KiB, in the L2 cache. Uninitialized: a piece is written before it is read.
#[repr(align(64))]
struct Widened(MaybeUninit<[f32; GROUP * PIECE * PANEL]>);

/// Copied activations of a tile. Uninitialized: written before they are read.
#[repr(align(64))]
struct Copied(MaybeUninit<[u8; TALL * COPY_STRIDE]>);

/// Storage type of the rows, and how micro-kernels read them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Given {
    F32,
    /// bfloat16, converted to an f32 copy.
    Widened,
    /// bfloat16, read as stored.
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

/// Work of a tile: a piece of K, and pointers to the tile's first row and panel.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) x: *const u8,
    /// Bytes from one row to the next.
    pub(super) x_stride: usize,
    pub(super) given: Given,
    pub(super) w: *const u8,
    /// Bytes from one panel to the next.
    pub(super) w_stride: usize,
    pub(super) depth: usize,
    pub(super) out: *mut f32,
    pub(super) stride: usize,
    /// Number of output columns, counted from the tile's first.
    pub(super) cols: usize,
    /// Whether sums start from zero or continue from `out`.
    pub(super) start: bool,
    /// First bias of the tile if the sums end here, else null.
    pub(super) bias: *const f32,
    /// Address to prefetch for the first panel, or null; `ahead_panel` and `ahead_step` are the byte distances to the
    /// next panel and the next k.
    pub(super) ahead: *const u8,
    pub(super) ahead_panel: usize,
    pub(super) ahead_step: usize,
}

impl Job {
    /// Job of the whole product, for micro-kernels that read f32; `None` if the product is empty.
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
        // Panels of bf16 pairs are padded to an even K.
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

    /// Changes the job to micro-kernels that read pairs of bfloat16.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn pairs(self) -> Self {
        debug_assert!(self.given == Given::Widened, "rows of bfloat16");
        Self { given: Given::Pairs, ..self }
    }

    /// Job that starts `rows` rows and `panels` panels later.
    unsafe fn at(self, rows: usize, panels: usize) -> Self {
        // SAFETY: the caller stays within the rows and panels of the job, so the moved pointers stay within their
        // slices.
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

    /// Job of a piece of K. The pointer to the weights stays unchanged.
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

    /// Copies some rows of the piece to `copy`, in the form that micro-kernels read, and points the job to them.
    #[allow(clippy::cast_ptr_alignment)] // rows of bfloat16 are slices of u16, and copies begin at cache lines or floats
    unsafe fn copied(mut self, rows: usize, copy: *mut u8) -> Self {
        for r in 0..rows {
            // SAFETY: the rows belong to the job, and `copy` has space for them.
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

/// Micro-kernel of one tile.
pub(super) type Body = unsafe fn(Job);

/// Micro-kernels for one number of rows: number of panels of the wide one, the wide one, the one for a single panel.
pub(super) type Bodies = (usize, Body, Body);

/// Micro-kernels by number of rows, tallest first, down to one row.
pub(super) type AllBodies = [(usize, Bodies)];

/// Converts a range of K of a panel to f32, 16 values per k.
pub(super) type Widen = unsafe fn(*const u8, Range<usize>, *mut f32);

/// Number of rows from which on all rows pass over a piece of K; float weights are then converted once for all rows.
pub(super) const PIECES_FROM_ROWS: usize = 3;

/// Micro-kernels of a path for one type of weights.
pub(super) struct Kernels {
    /// Micro-kernels over weights converted to f32.
    pub(super) bodies: &'static AllBodies,
    /// Micro-kernels of one row over weights as stored, if the path has them.
    pub(super) row: Option<Bodies>,
    pub(super) widen: Widen,
}

/// Multiplies all rows of `x` by `panels` of `w`. The caller has checked the shapes.
///
/// # Safety
/// The micro-kernels match the type of `w`, and the machine has their instructions.
pub(super) unsafe fn multiply<T: Activation>(
    kernels: &Kernels,
    x: FloatRows<'_, T>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    let (rows, Some(job)) = (x.rows(), Job::new(x, w, bias, &panels, out)) else { return };
    // SAFETY: `job` covers all rows and the panels; the caller guarantees the rest.
    unsafe {
        match kernels.row {
            Some(row) if rows < PIECES_FROM_ROWS => as_stored(row, job, rows, panels.len()),
            _ => widened(kernels.bodies, kernels.widen, job, rows, panels.len()),
        }
    }
}

/// Processes one row at a time over weights as stored, over all of K.
///
/// # Safety
/// The job covers the rows and panels, which are stored in the form that the micro-kernels read; the machine has their
/// instructions.
pub(super) unsafe fn as_stored(bodies: Bodies, job: Job, rows: usize, panels: usize) {
    let wide = bodies.0;
    let mut copy = MaybeUninit::<[f32; ROW_PIECE]>::uninit();
    let piece = if job.given == Given::Widened { ROW_PIECE } else { job.depth };
    for first in (0..panels).step_by(wide) {
        for row in 0..rows {
            for k in (0..job.depth).step_by(piece) {
                // SAFETY: pointers stay within the rows, panels and depth of the job; a piece of a row fits the copy.
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

/// Converts a piece of K of a group of panels to f32, then passes all rows over it.
///
/// # Safety
/// As [`as_stored`], with weights in the form that `widen` reads.
unsafe fn widened(bodies: &AllBodies, widen: Widen, job: Job, rows: usize, panels: usize) {
    let mut values = Widened(MaybeUninit::uninit());
    let mut widen_group = |source: Job, group: usize, k: Range<usize>| {
        let to = values.0.as_mut_ptr().cast::<f32>();
        for p in 0..group {
            // SAFETY: pointers stay within the panels and depth of the job; `GROUP` panels of `PIECE` fill the buffer
            // exactly.
            unsafe { widen(source.w.add(p * job.w_stride), k.clone(), to.add(p * PIECE * PANEL)) };
        }
        (to.cast_const().cast(), PIECE * PANEL * 4)
    };
    // SAFETY: this function's requirements include those of `in_pieces`.
    unsafe { in_pieces(bodies, PIECE, &mut widen_group, job, rows, panels) }
}

/// Passes all rows over pieces of two-byte weights as stored.
///
/// # Safety
/// As [`as_stored`].
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn halves(bodies: &AllBodies, job: Job, rows: usize, panels: usize) {
    let mut in_place = |source: Job, _: usize, k: Range<usize>| {
        // SAFETY: the pointer stays within the depth of the job.
        (unsafe { source.w.add(k.start * job.ahead_step) }, job.w_stride)
    };
    // SAFETY: this function's requirements include those of `in_pieces`.
    unsafe { in_pieces(bodies, HALF_PIECE, &mut in_place, job, rows, panels) }
}

/// Passes all rows over all pieces. `weights` returns the location of a piece of a group's panels and the bytes from
/// one panel to the next.
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
            // SAFETY: pointers stay within the rows, panels and depth of the job.
            unsafe {
                let source = job.at(0, first);
                let (w, w_stride) = weights(source, group, k..end);
                // Prefetch the next piece of these panels, or the first piece of the next group.
                let next = if end < job.depth { end * job.ahead_step } else { group * job.w_stride };
                let ahead = source.w.wrapping_add(next);
                all_rows(bodies, Job { w, w_stride, ahead, ..source.piece(k..end) }, rows, group, &mut copy);
            }
        }
    }
}

/// Passes all rows over a piece; the first tile prefetches the next piece.
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

/// Runs one tile of rows over some panels.
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

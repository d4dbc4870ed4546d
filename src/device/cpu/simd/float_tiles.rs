//! How a product of f32 rows is cut into tiles: over weights as stored, or groups of panels, pieces of K widened into a
//! buffer, then all rows, tallest tiles first.
//!
//! The order of one output value's additions is K's, whatever the cuts.

#![allow(unsafe_code)]

use super::super::arena::Tile;
use super::super::matmul::{FloatRows, columns_of};
use super::super::pack::{PANEL, PackedMatrix};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Panels widened together. Copying the activations of a tile is shared by all of them.
const GROUP: usize = 8;
/// K of a piece: a tile's activations (6 KiB) and two panels (16 KiB) stay in the first-level cache.
const PIECE: usize = 128;
/// How far ahead of its use a weight is asked for when it is read as stored.
const AHEAD_BYTES: usize = 4096;
/// Rows of the tallest tile that any path has.
const TALL: usize = 12;
/// Values from a row to the next in a copied tile: not a power of two, so that rows do not meet in one set of the cache,
/// as those of a matrix do when K is a multiple of 1,024.
const COPY_STRIDE: usize = PIECE + 16;

/// Widened weights: 64 KiB, in the second-level cache. Not initialised: a piece is written before it is read.
#[repr(align(64))]
struct Widened(MaybeUninit<[f32; GROUP * PIECE * PANEL]>);

/// Activations of a tile, likewise.
#[repr(align(64))]
struct Copied(MaybeUninit<[f32; TALL * COPY_STRIDE]>);

/// What a tile works on: a piece of K, pointers to the tile's first row and panel.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) x: *const f32,
    pub(super) x_stride: usize,
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
    /// The whole product; none if it is empty.
    pub(super) fn new(
        x: FloatRows<'_>,
        w: &PackedMatrix,
        bias: Option<&[f32]>,
        panels: &Range<usize>,
        out: &mut Tile<'_, f32>,
    ) -> Option<Self> {
        let columns = columns_of(w, panels);
        if columns.is_empty() || x.rows() == 0 {
            return None;
        }
        Some(Self {
            x: x.data().as_ptr(),
            x_stride: x.stride(),
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
            ahead_step: w.panel_bytes() / w.k(),
        })
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
}

/// One tile's body.
pub(super) type Body = unsafe fn(Job);

/// The bodies for some number of rows: over how many panels the wide one goes, the wide one, the one for a single panel.
pub(super) type Bodies = (usize, Body, Body);

/// Bodies by their number of rows, tallest first, down to one row.
pub(super) type AllBodies = [(usize, Bodies)];

/// Widens some k of a panel to 16 values each.
pub(super) type Widen = unsafe fn(*const u8, Range<usize>, *mut f32);

/// One row at a time over weights as they are stored, all of K at once.
///
/// # Safety
/// The job covers the rows and panels, stored as the bodies read them; the machine has what the bodies need.
pub(super) unsafe fn as_stored(bodies: Bodies, job: Job, rows: usize, panels: usize) {
    let wide = bodies.0;
    for first in (0..panels).step_by(wide) {
        for row in 0..rows {
            // SAFETY: within the rows and panels of the job.
            unsafe {
                let mut job = job.at(row, first);
                if row == 0 {
                    job.ahead = job.w.wrapping_add(AHEAD_BYTES);
                }
                over_panels(job, wide.min(panels - first), bodies);
            }
        }
    }
}

/// Widens a piece of K of a group of panels, then passes all rows over it: the bodies read f32.
///
/// # Safety
/// As [`as_stored`], with weights as `widen` reads them.
pub(super) unsafe fn widened(bodies: &AllBodies, widen: Widen, job: Job, rows: usize, panels: usize) {
    assert!(bodies.iter().all(|(height, _)| *height <= TALL), "the copy holds {TALL} rows");
    let mut values = Widened(MaybeUninit::uninit());
    let mut copy = Copied(MaybeUninit::uninit());
    for first in (0..panels).step_by(GROUP) {
        let group = GROUP.min(panels - first);
        for k in (0..job.depth).step_by(PIECE) {
            let end = (k + PIECE).min(job.depth);
            // SAFETY: within the rows, panels and depth of the job; `GROUP` panels of `PIECE` fill the buffer exactly.
            unsafe {
                let source = job.at(0, first);
                for p in 0..group {
                    let panel = source.w.add(p * job.w_stride);
                    widen(panel, k..end, values.0.as_mut_ptr().cast::<f32>().add(p * PIECE * PANEL));
                }
                // The next piece of these panels, or the first of the next group.
                let next = if end < job.depth { end * job.ahead_step } else { group * job.w_stride };
                let piece = Job {
                    x: source.x.add(k),
                    w: values.0.as_ptr().cast(),
                    w_stride: PIECE * PANEL * 4,
                    depth: end - k,
                    start: k == 0,
                    bias: if end == job.depth { source.bias } else { std::ptr::null() },
                    ahead: source.w.wrapping_add(next),
                    ..source
                };
                all_rows(bodies, piece, rows, group, &mut copy);
            }
        }
    }
}

/// All rows over a widened piece, the first of them asking for the next piece.
unsafe fn all_rows(bodies: &AllBodies, mut job: Job, rows: usize, panels: usize, copy: &mut Copied) {
    let mut row = 0;
    for &(height, body) in bodies {
        while rows - row >= height {
            // SAFETY: rows and panels of the tile are within the job's; `height` rows of a piece fit the copy.
            unsafe {
                let mut tile = job.at(row, 0);
                if height > 3 {
                    for r in 0..height {
                        let to = copy.0.as_mut_ptr().cast::<f32>().add(r * COPY_STRIDE);
                        std::ptr::copy_nonoverlapping(tile.x.add(r * tile.x_stride), to, tile.depth);
                    }
                    (tile.x, tile.x_stride) = (copy.0.as_ptr().cast(), COPY_STRIDE);
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

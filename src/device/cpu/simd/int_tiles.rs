//! Tiling of products of int8 rows: groups of panels, pieces of K, then all rows, tallest tiles first.
//!
//! The additions of one output value are in K order, whatever the tiling.

#![allow(unsafe_code)]

use super::formats::Format;
use crate::device::cpu::kernels::float_rows::columns_of;
use crate::device::cpu::kernels::q8_rows::{BLOCK, QuantRows, RECORD_BYTES};
use crate::device::cpu::memory::Tile;
use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use std::ops::Range;

/// Number of panels in a group, over which rows pass together.
pub(super) const GROUP: usize = 4;
/// Number of rows from which on K is split into pieces, so that a tile's operands (12 rows: 9 KiB, and 9 KiB per panel)
/// stay in the L1 cache; between pieces the sums are kept in `out`. With fewer rows the weights come from memory
/// anyway, in long streams.
const PIECES_FROM_ROWS: usize = 12;
/// K of a piece: a multiple of every unit.
const PIECE: usize = 512;

/// Work of a tile: a piece of K, and pointers to the tile's first row and panel.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) x: *const u8,
    pub(super) record: *const u8,
    pub(super) row_bytes: usize,
    pub(super) w: *const u8,
    /// Bytes of the piece in a panel; `panel_bytes` is the distance from one panel to the next.
    pub(super) piece_bytes: usize,
    pub(super) panel_bytes: usize,
    pub(super) out: *mut f32,
    pub(super) stride: usize,
    /// Number of output columns, counted from the tile's first.
    pub(super) cols: usize,
    /// Whether sums start from zero or continue from `out`.
    pub(super) start: bool,
    /// First bias of the tile if the sums end here, else null.
    pub(super) bias: *const f32,
    /// Whether these rows prefetch the weights for the rows after them.
    pub(super) ahead: bool,
    /// Bytes from the piece's start to the panel's end; `skip` is the distance from there to the place where its stream
    /// continues in the next group.
    pub(super) left: usize,
    pub(super) skip: usize,
}

impl Job {
    /// Job of the whole product; `None` if the product is empty. `skip`: distance that a stream jumps at a panel's end.
    pub(super) fn new(
        x: QuantRows<'_>,
        w: &PackedMatrix,
        bias: Option<&[f32]>,
        panels: &Range<usize>,
        out: &mut Tile<'_, f32>,
        skip: usize,
    ) -> Option<Self> {
        let columns = columns_of(w, panels);
        if columns.is_empty() || x.rows() == 0 {
            return None;
        }
        Some(Self {
            x: x.bytes().as_ptr(),
            record: x.bytes()[x.layout().records_at()..].as_ptr(),
            row_bytes: x.layout().row_bytes(),
            w: w.panel(panels.start).as_ptr(),
            piece_bytes: w.panel_bytes(),
            panel_bytes: w.panel_bytes(),
            stride: out.stride(),
            out: out.as_mut_ptr(),
            cols: columns.len(),
            start: true,
            bias: bias.map_or(std::ptr::null(), |bias| bias[columns.start..].as_ptr()),
            ahead: true,
            left: w.panel_bytes(),
            skip,
        })
    }

    /// Job that starts `rows` rows and `panels` panels later.
    pub(super) unsafe fn at(self, rows: usize, panels: usize) -> Self {
        // SAFETY: the caller stays within the rows and panels of the job, so the moved pointers stay within their
        // slices.
        unsafe {
            Self {
                x: self.x.add(rows * self.row_bytes),
                record: self.record.add(rows * self.row_bytes),
                w: self.w.add(panels * self.panel_bytes),
                out: self.out.add(rows * self.stride + panels * PANEL),
                cols: self.cols - panels * PANEL,
                bias: if self.bias.is_null() { self.bias } else { self.bias.add(panels * PANEL) },
                ..self
            }
        }
    }

    /// Job of the piece of K that starts at `k`, in `bytes` bytes of each panel at offset `at`.
    unsafe fn piece(self, k: usize, at: usize, bytes: usize) -> Self {
        // SAFETY: the caller stays within the depth of the job.
        unsafe {
            Self {
                x: self.x.add(k),
                record: self.record.add(k / BLOCK * RECORD_BYTES),
                w: self.w.add(at),
                piece_bytes: bytes,
                start: k == 0,
                bias: if at + bytes == self.panel_bytes { self.bias } else { std::ptr::null() },
                left: self.panel_bytes - at,
                ..self
            }
        }
    }
}

/// Micro-kernel of one tile.
pub(super) type Body = unsafe fn(Job);

/// Micro-kernels, each with its number of rows: number of panels of the wide one, the wide one, the one for a single
/// panel.
pub(super) type Bodies = [(usize, usize, Body, Body)];

/// Passes all rows over the panels group by group and piece by piece of K; a group's piece stays in the L2 cache.
///
/// # Safety
/// The job covers the rows and panels, whose format is `F`; the machine has the micro-kernels' instructions.
pub(super) unsafe fn all<F: Format>(bodies: &Bodies, job: Job, rows: usize, panels: usize) {
    let piece_bytes = if rows < PIECES_FROM_ROWS {
        job.panel_bytes
    } else {
        PIECE / (BLOCK * F::SCHEME.subs) * F::SCHEME.unit_bytes()
    };
    for first in (0..panels).step_by(GROUP) {
        for (i, at) in (0..job.panel_bytes).step_by(piece_bytes).enumerate() {
            // SAFETY: the group and the piece are within the job's.
            unsafe {
                let piece = job.at(0, first).piece(i * PIECE, at, piece_bytes.min(job.panel_bytes - at));
                all_rows(bodies, piece, rows, GROUP.min(panels - first));
            }
        }
    }
}

unsafe fn all_rows(bodies: &Bodies, mut job: Job, rows: usize, panels: usize) {
    let mut row = 0;
    for &(height, width, wide, single) in bodies {
        while rows - row >= height {
            let mut panel = 0;
            // SAFETY: rows and panels of the tile are within the job's.
            unsafe {
                while panels - panel >= width {
                    wide(job.at(row, panel));
                    panel += width;
                }
                while panel < panels {
                    single(job.at(row, panel));
                    panel += 1;
                }
            }
            row += height;
            job.ahead = false;
        }
    }
}

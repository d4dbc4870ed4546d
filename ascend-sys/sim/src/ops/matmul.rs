//! Matrix products, and tiled weights.

use super::{dot, has_dims, is_contiguous, is_one_of, same_elem};
use crate::codes::{Done, OP_INVALID, rule};
use crate::executor::{Prepared, input, maybe, output};
use crate::operands::Bench;
use crate::runtime::memory::memory;
use crate::tensor::{Elem, View};
use std::ops::Range;

const FLOATS: [Elem; 3] = [Elem::F32, Elem::F16, Elem::BF16];

/// `out[M,N] = x[M,K] · weight[K,N] (+ bias)`; the weight may be a transposition of stored rows, or tiled.
pub(crate) fn mm(x: &View, weight: &View, bias: Option<&View>, out: &View, cube_math_type: i8) -> Done<Prepared> {
    rule!(x.dims.len() == 2 && weight.dims.len() == 2, OP_INVALID, "matrices have two dimensions");
    let (m, k, n) = (x.dims[0], x.dims[1], weight.dims[1]);
    rule!(weight.dims[0] == k, OP_INVALID, "[{m},{k}] times {:?}", weight.dims);
    is_one_of(x, &FLOATS, "self")?;
    same_elem(x, weight, "mat2")?;
    same_elem(x, out, "out")?;
    has_dims(out, &[m, n], "out")?;
    rule!(!x.is_nz() && !out.is_nz(), OP_INVALID, "only the weight may be tiled");
    rule!((0..=4).contains(&cube_math_type), OP_INVALID, "cubeMathType {cube_math_type}");
    rule!(cube_math_type != 2 || x.elem != Elem::BF16, OP_INVALID, "cubeMathType 2 (f16) does not go with bf16");
    if weight.is_nz() {
        check_tiles(weight)?;
        rule!(bias.is_none(), OP_INVALID, "a tiled weight takes no bias");
    }
    if let Some(bias) = bias {
        same_elem(x, bias, "self (bias)")?;
        let fits = bias.dims == [n] || bias.dims == [1, n] || bias.dims == [m, n];
        rule!(fits, OP_INVALID, "bias {:?} for [{m},{n}]", bias.dims);
    }
    // Inputs are numbered in the operation's order: the bias of Addmm is first.
    let shift = usize::from(bias.is_some());
    let operands = vec![input(shift, x), input(shift + 1, weight), maybe(0, bias), output(0, out)];
    let kernel = move |bench: &mut Bench<'_>| {
        let rows = bench.floats(0)?;
        let bias = if bench.has(2) { bench.floats(2)? } else { Vec::new() };
        let mut sums = columns(bench, 1)?.times(bench, &rows, |_, _| ())?;
        for (at, sum) in sums.iter_mut().enumerate() {
            *sum += match bias.len() {
                0 => 0.0,
                len if len == n => bias[at % n],
                _ => bias[at],
            };
        }
        bench.store(3, &sums)
    };
    let rate = if x.elem == Elem::F32 { 4 } else { 1 };
    Ok(Prepared::new(operands, kernel).cube(2 * m * n * k * rate))
}

/// A weight `[K,N]` from which whole columns are read.
pub(crate) struct Columns {
    view: View,
    /// All elements, if columns are not contiguous.
    all: Vec<f32>,
}

pub(crate) fn columns(bench: &Bench<'_>, i: usize) -> Done<Columns> {
    let view = bench.view(i);
    let all = if view.is_nz() {
        let mut all = Vec::new();
        bench.stretch(&view, view.offset, view.storage.iter().product(), &mut all)?;
        all
    } else if view.is_transposed() {
        Vec::new()
    } else {
        bench.floats(i)?
    };
    Ok(Columns { view, all })
}

impl Columns {
    /// Multiplies `rows[M,K]` by the weight, `[M,N]`; each column is passed through `adjust` first. Each sum is
    /// computed by [`dot`] whatever the number of rows; two threads share large products.
    pub(crate) fn times(
        &self,
        bench: &Bench<'_>,
        rows: &[f32],
        adjust: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Done<Vec<f32>> {
        const WORTH_A_THREAD: usize = 4 << 20;
        let (k, n) = (self.view.dims[0], self.view.dims[1]);
        // Computes sums column by column.
        let some = |columns: Range<usize>| -> Done<Vec<f32>> {
            let mut column = Vec::with_capacity(k);
            let mut sums = Vec::with_capacity(columns.len() * rows.len() / k);
            for c in columns {
                column.clear();
                self.column(bench, c, &mut column)?;
                adjust(c, &mut column);
                sums.extend(rows.chunks_exact(k).map(|row| dot(row, &column)));
            }
            Ok(sums)
        };
        let half = if rows.len() * n > WORTH_A_THREAD { n / 2 } else { n };
        let (first, second) = std::thread::scope(|scope| {
            let second = (half < n).then(|| scope.spawn(|| some(half..n)));
            (some(0..half), second.map_or(Ok(Vec::new()), |thread| thread.join().expect("no product panics")))
        });
        let (turned, m) = ([first?, second?].concat(), rows.len() / k);
        Ok((0..m).flat_map(|r| turned[r..].iter().step_by(m).copied()).collect())
    }

    fn column(&self, bench: &Bench<'_>, c: usize, into: &mut Vec<f32>) -> Done {
        let (k, n) = (self.view.dims[0], self.view.dims[1]);
        if self.view.is_nz() {
            let is_turned = self.view.is_transposed();
            into.extend((0..k).map(|r| {
                let place = if is_turned { self.view.tiled_place(c, r) } else { self.view.tiled_place(r, c) };
                self.all[place]
            }));
            Ok(())
        } else if self.all.is_empty() {
            bench.stretch(&self.view, self.view.offset + c * self.view.strides[1], k, into)
        } else {
            into.extend((0..k).map(|r| self.all[r * n + c]));
            Ok(())
        }
    }
}

/// Checks that the storage shape of a tiled matrix matches its view.
fn check_tiles(weight: &View) -> Done {
    let (rows, cols) =
        if weight.is_transposed() { (weight.dims[1], weight.dims[0]) } else { (weight.dims[0], weight.dims[1]) };
    let width = tile_width(weight.elem);
    let wanted = [cols.div_ceil(width), rows.div_ceil(16), 16, width];
    rule!(weight.storage == wanted, OP_INVALID, "tiles {:?} for {rows} rows of {cols}, not {wanted:?}", weight.storage);
    rule!(rows > 1 && cols > 1, OP_INVALID, "a matrix with a dimension of 1 cannot be tiled");
    Ok(())
}

/// Number of elements in a tile's row: 32 bytes.
fn tile_width(elem: Elem) -> usize {
    32 * 8 / elem.bits()
}

/// Number of elements of a tiled matrix.
pub(crate) fn tiled_elements(rows: usize, cols: usize, elem: Elem) -> Done<usize> {
    rule!(matches!(elem, Elem::F16 | Elem::BF16 | Elem::I8), OP_INVALID, "{elem:?} cannot be tiled");
    Ok(rows.next_multiple_of(16) * cols.next_multiple_of(tile_width(elem)))
}

pub(crate) fn mm_tiled(x: &View, weight: &View, out: &View, cube_math_type: i8) -> Done<Prepared> {
    rule!(weight.is_nz(), OP_INVALID, "the weight must be tiled");
    rule!(matches!(cube_math_type, 0 | 2), OP_INVALID, "cubeMathType {cube_math_type}; 0 or 2 with tiles");
    mm(x, weight, None, out, cube_math_type)
}

/// Rearranges stored rows into tiles, in place.
pub(crate) fn tile(weight: &View) -> Done<Prepared> {
    rule!(weight.dims.len() == 2, OP_INVALID, "a weight has two dimensions");
    is_contiguous(weight, "mmWeightRef")?;
    let (rows, cols) = (weight.dims[0], weight.dims[1]);
    let elements = tiled_elements(rows, cols, weight.elem)?;
    let bytes = elements * weight.elem.bits() / 8;
    if let Err(fail) = memory().check(weight.address, bytes) {
        crate::codes::fail!(OP_INVALID, "the buffer does not hold {elements} elements: {}", fail.message);
    }
    let width = tile_width(weight.elem);
    let kernel = move |bench: &mut Bench<'_>| {
        let view = bench.view(0);
        let size = view.elem.bits() / 8;
        let raw = bench.memory.bytes_mut(view.address, bytes)?;
        let plain = raw[..rows * cols * size].to_vec();
        let tiled = View { storage: vec![cols.div_ceil(width), rows.div_ceil(16), 16, width], ..view };
        raw.fill(0);
        for r in 0..rows {
            for c in 0..cols {
                let (from, to) = ((r * cols + c) * size, tiled.tiled_place(r, c) * size);
                raw[to..to + size].copy_from_slice(&plain[from..from + size]);
            }
        }
        Ok(())
    };
    Ok(Prepared::new(vec![input(0, weight)], kernel).once())
}

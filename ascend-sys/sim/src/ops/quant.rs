//! Quantized products.

use super::matmul::columns;
use super::{has_dims, is_contiguous, is_one_of, same_elem};
use crate::codes::{Done, OP_INVALID, rule};
use crate::executor::{Prepared, input, maybe, output};
use crate::operands::{Bench, rounded};
use crate::tensor::{Elem, View};

/// Largest magnitude of a quantized activation.
const LARGEST: f32 = 127.0;

/// Largest K and N of a product with quantized weights and float activations, and length of the longest rows if both
/// are quantized.
const MAX_SIDE: usize = 65_535;

/// Quantizes rows to int8 with one scale per row.
pub(crate) fn dynamic_quant(x: &View, y: &View, scale: &View) -> Done<Prepared> {
    is_one_of(x, &[Elem::F16, Elem::BF16], "x")?;
    is_one_of(y, &[Elem::I8], "yOut")?;
    is_one_of(scale, &[Elem::F32], "scaleOut")?;
    has_dims(y, &x.dims, "yOut")?;
    has_dims(scale, &x.dims[..x.dims.len() - 1], "scaleOut")?;
    let cols = x.cols();
    let kernel = move |bench: &mut Bench<'_>| {
        let x = bench.floats(0)?;
        let scales: Vec<f32> =
            x.chunks(cols).map(|row| row.iter().fold(0.0f32, |most, v| most.max(v.abs())) / LARGEST).collect();
        let quantized: Vec<f32> = x
            .chunks(cols)
            .zip(&scales)
            .flat_map(|(row, &scale)| {
                row.iter().map(move |v| if scale > 0.0 { (v / scale).round_ties_even() } else { 0.0 })
            })
            .collect();
        bench.store(1, &quantized)?;
        bench.store(2, &scales)
    };
    let operands = vec![input(0, x), output(0, y), output(1, scale)];
    Ok(Prepared::new(operands, kernel).vector(4 * x.count()))
}

/// `out[M,N] = (x · weight) · scale[N] · row_scale[M] (+ bias[N])` over int8.
#[allow(clippy::too_many_arguments)]
pub(crate) fn quant_matmul(
    x: &View,
    weight: &View,
    scale: &View,
    row_scale: Option<&View>,
    bias: Option<&View>,
    is_turned: bool,
    out: &View,
) -> Done<Prepared> {
    is_one_of(x, &[Elem::I8], "x1")?;
    is_one_of(weight, &[Elem::I8], "x2")?;
    rule!(x.dims.len() == 2 && weight.dims.len() == 2, OP_INVALID, "matrices have two dimensions");
    let (m, k) = (x.dims[0], x.dims[1]);
    let (depth, n) = if is_turned { (weight.dims[1], weight.dims[0]) } else { (weight.dims[0], weight.dims[1]) };
    rule!(depth == k, OP_INVALID, "[{m},{k}] times {:?}, transposed: {is_turned}", weight.dims);
    rule!(
        k <= MAX_SIDE && weight.dims[1] <= MAX_SIDE,
        OP_INVALID,
        "rows of {k} and {}; at most {MAX_SIDE}",
        weight.dims[1]
    );
    has_dims(out, &[m, n], "out")?;
    is_one_of(out, &[Elem::F16, Elem::BF16], "out")?;
    rule!(scale.dims == [n] || scale.dims == [1], OP_INVALID, "scale {:?} for {n} columns", scale.dims);
    match (out.elem, row_scale) {
        (Elem::BF16, _) => is_one_of(scale, &[Elem::F32, Elem::BF16], "scale")?,
        (_, Some(_)) => is_one_of(scale, &[Elem::F32], "scale")?,
        (_, None) => {
            crate::codes::fail!(OP_INVALID, "f16 without a scale a row takes packed scales: not supported here")
        }
    }
    if let Some(row_scale) = row_scale {
        is_one_of(row_scale, &[Elem::F32], "pertokenScale")?;
        has_dims(row_scale, &[m], "pertokenScale")?;
    }
    if let Some(bias) = bias {
        is_one_of(bias, &[Elem::I32, Elem::F32, Elem::BF16, Elem::F16], "bias")?;
        has_dims(bias, &[n], "bias")?;
    }
    if weight.is_nz() {
        rule!(
            k.is_multiple_of(32) && n.is_multiple_of(32),
            OP_INVALID,
            "[{k},{n}] in tiles; multiples of 32 are needed"
        );
    } else {
        is_contiguous(weight, "x2")?;
    }
    let kernel = move |bench: &mut Bench<'_>| {
        let (x, scale) = (bench.whole(0)?, bench.floats(2)?);
        let row_scale = if bench.has(3) { bench.floats(3)? } else { vec![1.0; m] };
        let bias = if bench.has(4) { bench.floats(4)? } else { vec![0.0; n] };
        let is_whole_bias = bench.has(4) && bench.view(4).elem == Elem::I32;
        let view = bench.view(1);
        let stored = View { strides: vec![1; 1], dims: vec![view.storage.iter().product()], ..view.clone() };
        let mut all = Vec::new();
        bench.stretch(&stored, view.offset, stored.dims[0], &mut all)?;
        let place = |r: usize, c: usize| if view.is_nz() { view.tiled_place(r, c) } else { r * view.dims[1] + c };
        // Sums of up to 65,535 products of bytes fit in 32 bits.
        #[allow(clippy::cast_possible_truncation)]
        let x: Vec<i32> = x.into_iter().map(|value| value as i32).collect();
        let mut column = vec![0i32; k];
        let mut sums = vec![0.0; m * n];
        for c in 0..n {
            for (i, value) in column.iter_mut().enumerate() {
                #[allow(clippy::cast_possible_truncation)]
                let whole = all[if is_turned { place(c, i) } else { place(i, c) }] as i32;
                *value = whole;
            }
            for r in 0..m {
                let mut sum = i64::from(x[r * k..][..k].iter().zip(&column).map(|(a, b)| a * b).sum::<i32>());
                if is_whole_bias {
                    #[allow(clippy::cast_possible_truncation)]
                    let whole = bias[c] as i64;
                    sum += whole;
                }
                let scaled = sum as f32 * scale[if scale.len() == n { c } else { 0 }] * row_scale[r];
                sums[r * n + c] = if is_whole_bias { scaled } else { scaled + bias[c] };
            }
        }
        bench.store(5, &sums)
    };
    let operands =
        vec![input(0, x), input(1, weight), input(2, scale), maybe(4, row_scale), maybe(5, bias), output(0, out)];
    // int8 has twice the rate of f16.
    Ok(Prepared::new(operands, kernel).cube(m * n * k))
}

/// `out[M,N] = x · ((weight[K,N] + offset) · scale) (+ bias)`, with one scale per column or per group of rows. The cube
/// takes weights in the type of `x`: sum and product are rounded to it, as in the operation's own reference
/// (`hicann/ops-nn`, `matmul/weight_quant_batch_matmul_v2`). A bias is f16 for f16 rows and f32 for bf16 rows.
pub(crate) fn weight_quant_matmul(
    x: &View,
    weight: &View,
    scale: &View,
    offset: Option<&View>,
    bias: Option<&View>,
    group: i32,
    out: &View,
) -> Done<Prepared> {
    is_one_of(x, &[Elem::F16, Elem::BF16], "x")?;
    same_elem(x, scale, "antiquantScale")?;
    same_elem(x, out, "y")?;
    rule!(x.dims.len() == 2 && weight.dims.len() == 2, OP_INVALID, "matrices have two dimensions");
    let weight = &unpacked(weight)?;
    is_one_of(weight, &[Elem::I8, Elem::I4], "weight")?;
    let (m, k, n) = (x.dims[0], x.dims[1], weight.dims[1]);
    rule!(weight.dims[0] == k, OP_INVALID, "[{m},{k}] times {:?}", weight.dims);
    rule!(k <= MAX_SIDE && n <= MAX_SIDE, OP_INVALID, "[{k},{n}]; at most {MAX_SIDE}: split the weight");
    has_dims(out, &[m, n], "y")?;
    let group = usize::try_from(group).unwrap_or(usize::MAX);
    if group == 0 {
        rule!(weight.is_transposed(), OP_INVALID, "a scale a column needs a transposed weight");
        rule!(scale.dims == [n] || scale.dims == [1, n], OP_INVALID, "antiquantScale {:?}", scale.dims);
    } else {
        rule!(group.is_multiple_of(32) && group < k, OP_INVALID, "groups of {group}; a multiple of 32 below {k}");
        is_contiguous(weight, "weight")?;
        has_dims(scale, &[k.div_ceil(group), n], "antiquantScale")?;
    }
    if let Some(offset) = offset {
        same_elem(x, offset, "antiquantOffset")?;
        has_dims(offset, &scale.dims, "antiquantOffset")?;
    }
    if let Some(bias) = bias {
        rule!(bias.dims == [n] || bias.dims == [1, n], OP_INVALID, "bias {:?}", bias.dims);
        is_one_of(bias, &[if x.elem == Elem::BF16 { Elem::F32 } else { Elem::F16 }], "bias")?;
    }
    if weight.elem == Elem::I4 {
        let inner = if weight.is_transposed() { k } else { n };
        rule!(inner.is_multiple_of(2), OP_INVALID, "int4 rows of {inner} elements; an even number is needed");
    }
    let elem = x.elem;
    let kernel = move |bench: &mut Bench<'_>| {
        let (x, scale) = (bench.floats(0)?, bench.floats(2)?);
        let offset = if bench.has(3) { Some(bench.floats(3)?) } else { None };
        let bias = if bench.has(4) { bench.floats(4)? } else { vec![0.0; n] };
        let scaled = |c: usize, column: &mut [f32]| {
            for (i, value) in column.iter_mut().enumerate() {
                let at = i.checked_div(group).unwrap_or(0) * n + c;
                if let Some(offset) = &offset {
                    *value = rounded(*value + offset[at], elem);
                }
                *value = rounded(*value * scale[at], elem);
            }
        };
        let mut sums = columns(bench, 1)?.times(bench, &x, scaled)?;
        for (at, sum) in sums.iter_mut().enumerate() {
            *sum += bias[at % n];
        }
        bench.store(5, &sums)
    };
    let operands =
        vec![input(0, x), input(1, weight), input(2, scale), maybe(3, offset), maybe(6, bias), output(0, out)];
    Ok(Prepared::new(operands, kernel).cube(2 * m * n * k).vector(2 * n * k))
}

/// Unpacks int4 stored as int32, eight per word.
fn unpacked(weight: &View) -> Done<View> {
    if weight.elem != Elem::I32 {
        return Ok(weight.clone());
    }
    is_contiguous(weight, "packed weight")?;
    let dims = vec![weight.dims[0], weight.dims[1] * 8];
    Ok(View {
        elem: Elem::I4,
        strides: vec![dims[1], 1],
        offset: weight.offset * 8,
        storage: dims.clone(),
        dims,
        ..weight.clone()
    })
}

//! Mixture of experts: gating, sorting rows by expert, multiplying each expert's rows, combining.

use super::{dot, has_dims, is_contiguous, is_one_of, same_elem};
use crate::codes::{Done, OP_INVALID, RT_VECTOR_CORE_EXCEPTION, fail, rule};
use crate::executor::{Prepared, input, listed, output};
use crate::operands::Bench;
use crate::tensor::{Elem, View};

fn size(n: i64, what: &str) -> Done<usize> {
    match usize::try_from(n) {
        Ok(n) if n > 0 => Ok(n),
        _ => fail!(OP_INVALID, "{what} is {n}"),
    }
}

/// Selects the k best experts of each token. `renorm` 1 applies the softmax to the k selected, 0 to all.
pub(crate) fn gate(logits: &View, k: i64, renorm: i64, weights: &View, experts: &View) -> Done<Prepared> {
    rule!(logits.elem.is_float() && logits.dims.len() == 2, OP_INVALID, "x is {:?} {:?}", logits.elem, logits.dims);
    let (tokens, all, k) = (logits.dims[0], logits.dims[1], size(k, "k")?);
    rule!(k <= all, OP_INVALID, "{k} of {all} experts");
    rule!(matches!(renorm, 0 | 1), OP_INVALID, "renorm {renorm}");
    same_elem(logits, weights, "yOut")?;
    is_one_of(experts, &[Elem::I32], "expertIdxOut")?;
    has_dims(weights, &[tokens, k], "yOut")?;
    has_dims(experts, &[tokens, k], "expertIdxOut")?;
    let kernel = move |bench: &mut Bench<'_>| {
        let (mut weights, mut experts) = (Vec::new(), Vec::new());
        for row in bench.floats(0)?.chunks_mut(all) {
            if renorm == 0 {
                super::reduce::soften(row);
            }
            let mut order: Vec<usize> = (0..all).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            let mut best: Vec<f32> = order[..k].iter().map(|&expert| row[expert]).collect();
            if renorm == 1 {
                super::reduce::soften(&mut best);
            }
            weights.extend(best);
            experts.extend(order[..k].iter().map(|&expert| expert as i64));
        }
        bench.store(1, &weights)?;
        bench.store_whole(2, &experts)
    };
    let operands = vec![input(0, logits), output(0, weights), output(1, experts)];
    Ok(Prepared::new(operands, kernel).vector(8 * logits.count()))
}

/// Copies the tokens' rows sorted by expert; within an expert in token order.
#[allow(clippy::too_many_arguments)]
pub(crate) fn route(
    x: &View,
    experts: &View,
    expert_count: i64,
    drop_pad_mode: i64,
    count_flag: i64,
    expanded: &View,
    row_index: &View,
    counts: &View,
) -> Done<Prepared> {
    rule!(drop_pad_mode == 0, OP_INVALID, "dropPadMode {drop_pad_mode}; 0 is supported here");
    rule!(matches!(count_flag, 1 | 2), OP_INVALID, "expertTokensCountOrCumsumFlag {count_flag}");
    let all = size(expert_count, "expertNum")?;
    is_one_of(experts, &[Elem::I32], "expertIdx")?;
    rule!(experts.dims.len() == 2 && x.dims.len() == 2, OP_INVALID, "x {:?}, expertIdx {:?}", x.dims, experts.dims);
    let (tokens, k, width) = (x.dims[0], experts.dims[1], x.dims[1]);
    rule!(experts.dims[0] == tokens, OP_INVALID, "expertIdx {:?} for {tokens} tokens", experts.dims);
    same_elem(x, expanded, "expandedXOut")?;
    has_dims(expanded, &[tokens * k, width], "expandedXOut")?;
    for (view, dims, what) in [(row_index, tokens * k, "expandedRowIdxOut"), (counts, all, "expertTokensOut")] {
        is_one_of(view, &[Elem::I32], what)?;
        has_dims(view, &[dims], what)?;
    }
    let kernel = move |bench: &mut Bench<'_>| {
        let (x, experts) = (bench.floats(0)?, bench.whole(1)?);
        let mut counts = vec![0i64; all];
        for &expert in &experts {
            match usize::try_from(expert).ok().and_then(|expert| counts.get_mut(expert)) {
                Some(count) => *count += 1,
                None => fail!(RT_VECTOR_CORE_EXCEPTION, "expert {expert} of {all}"),
            }
        }
        let mut order: Vec<usize> = (0..experts.len()).collect();
        order.sort_by_key(|&row| experts[row]);
        let mut places = vec![0i64; experts.len()];
        let mut rows = Vec::with_capacity(order.len() * width);
        for (to, &from) in order.iter().enumerate() {
            places[from] = to as i64;
            rows.extend_from_slice(&x[from / k * width..][..width]);
        }
        if count_flag == 1 {
            let mut sum = 0;
            for count in &mut counts {
                sum += *count;
                *count = sum;
            }
        }
        bench.store(2, &rows)?;
        bench.store_whole(3, &places)?;
        bench.store_whole(4, &counts)
    };
    let operands = vec![input(0, x), input(1, experts), output(0, expanded), output(1, row_index), output(2, counts)];
    Ok(Prepared::new(operands, kernel).vector(expanded.count()))
}

/// Multiplies each group of rows by its own matrix.
#[allow(clippy::too_many_arguments)]
pub(crate) fn grouped(
    x: &View,
    weight: &View,
    groups: &View,
    split_item: i64,
    group_type: i64,
    group_list_type: i64,
    act_type: i64,
    out: &View,
) -> Done<Prepared> {
    rule!(matches!(split_item, 2 | 3), OP_INVALID, "splitItem {split_item}; 2 or 3 for one output");
    rule!(group_type == 0, OP_INVALID, "groupType {group_type}; 0 divides the rows of x");
    rule!(
        matches!(group_list_type, 0 | 1) && act_type == 0,
        OP_INVALID,
        "groupListType {group_list_type}, actType {act_type}"
    );
    rule!(x.elem.is_half(), OP_INVALID, "x is {:?}", x.elem);
    same_elem(x, weight, "weight")?;
    same_elem(x, out, "out")?;
    is_contiguous(weight, "weight")?;
    rule!(x.dims.len() == 2 && weight.dims.len() == 3, OP_INVALID, "x {:?}, weight {:?}", x.dims, weight.dims);
    let (rows, k) = (x.dims[0], x.dims[1]);
    let (experts, n) = (weight.dims[0], weight.dims[2]);
    rule!(weight.dims[1] == k, OP_INVALID, "[{rows},{k}] times {:?}", weight.dims);
    has_dims(out, &[rows, n], "out")?;
    is_one_of(groups, &[Elem::I64], "groupList")?;
    has_dims(groups, &[experts], "groupList")?;
    let kernel = move |bench: &mut Bench<'_>| {
        let (x, groups) = (bench.floats(0)?, bench.whole(2)?);
        let view = bench.view(1);
        let mut out = vec![0.0; rows * n];
        let mut first = 0;
        for (expert, &count) in groups.iter().enumerate() {
            let end = if group_list_type == 0 { count } else { first as i64 + count };
            let end = match usize::try_from(end) {
                Ok(end) if (first..=rows).contains(&end) => end,
                _ => fail!(RT_VECTOR_CORE_EXCEPTION, "group {expert} ends at {end} of {rows} rows"),
            };
            let mut matrix = Vec::new();
            bench.stretch(&view, view.offset + expert * k * n, k * n, &mut matrix)?;
            for c in 0..n {
                let column: Vec<f32> = (0..k).map(|i| matrix[i * n + c]).collect();
                for r in first..end {
                    out[r * n + c] = dot(&x[r * k..][..k], &column);
                }
            }
            first = end;
        }
        bench.store(3, &out)
    };
    let operands = vec![listed(0, x), listed(1, weight), input(8, groups), output(0, out)];
    Ok(Prepared::new(operands, kernel).cube(2 * rows * n * k))
}

/// Computes the weighted sum of each token's rows, in the token's own order of experts.
pub(crate) fn combine(
    expanded: &View,
    row_index: &View,
    weights: &View,
    experts: &View,
    drop_pad_mode: i64,
    out: &View,
) -> Done<Prepared> {
    rule!(drop_pad_mode == 2, OP_INVALID, "dropPadMode {drop_pad_mode}; 2 goes with rows in the tokens' order");
    rule!(weights.dims.len() == 2 && out.dims.len() == 2, OP_INVALID, "scales {:?}, out {:?}", weights.dims, out.dims);
    let (tokens, k, width) = (weights.dims[0], weights.dims[1], out.dims[1]);
    has_dims(expanded, &[tokens * k, width], "expandedX")?;
    has_dims(row_index, &[tokens * k], "expandedRowIdx")?;
    has_dims(experts, &[tokens, k], "expertIdx")?;
    has_dims(out, &[tokens, width], "out")?;
    is_one_of(row_index, &[Elem::I32], "expandedRowIdx")?;
    same_elem(expanded, out, "out")?;
    let kernel = move |bench: &mut Bench<'_>| {
        let (rows, places, weights) = (bench.floats(0)?, bench.whole(1)?, bench.floats(2)?);
        let mut out = vec![0.0; tokens * width];
        for (at, (&place, &weight)) in places.iter().zip(&weights).enumerate() {
            let place = match usize::try_from(place) {
                Ok(place) if place < tokens * k => place,
                _ => fail!(RT_VECTOR_CORE_EXCEPTION, "row {place} of {}", tokens * k),
            };
            for (sum, value) in out[at / k * width..][..width].iter_mut().zip(&rows[place * width..][..width]) {
                *sum += weight * value;
            }
        }
        bench.store(4, &out)
    };
    let operands = vec![input(0, expanded), input(1, row_index), input(5, weights), input(6, experts), output(0, out)];
    Ok(Prepared::new(operands, kernel).vector(2 * expanded.count()))
}

//! Operations on indexed rows: gather, embedding, scatter into caches.

use super::{has_dims, is_contiguous, is_one_of, same_elem};
use crate::codes::{Done, OP_INVALID, RT_VECTOR_CORE_EXCEPTION, rule};
use crate::control;
use crate::executor::{Prepared, input, output};
use crate::operands::Bench;
use crate::tensor::{Elem, View};
use std::collections::HashSet;

/// `out[ids.., H] = weight[ids]`. A negative id is an operator error; an id that is too large gives garbage.
pub(crate) fn embedding(weight: &View, ids: &View, out: &View) -> Done<Prepared> {
    rule!(weight.dims.len() == 2, OP_INVALID, "weight has {} dimensions", weight.dims.len());
    rows_of(weight, ids, out, true)
}

/// `out[R, ..] = x[index[R], ..]`.
pub(crate) fn index_select(x: &View, dim: i64, index: &View, out: &View) -> Done<Prepared> {
    rule!(dim == 0, OP_INVALID, "dim {dim}; 0 is supported here");
    rule!(index.dims.len() == 1, OP_INVALID, "index has {} dimensions", index.dims.len());
    rows_of(x, index, out, false)
}

fn rows_of(x: &View, index: &View, out: &View, gives_garbage: bool) -> Done<Prepared> {
    rule!(index.elem.is_index(), OP_INVALID, "indices are {:?}", index.elem);
    same_elem(x, out, "out")?;
    has_dims(out, &[&index.dims[..], &x.dims[1..]].concat(), "out")?;
    let (rows, width) = (x.dims[0], x.count() / x.dims[0]);
    let kernel = move |bench: &mut Bench<'_>| {
        let view = bench.view(0);
        let mut values = Vec::new();
        for index in bench.whole(1)? {
            match usize::try_from(index).ok().filter(|&row| row < rows) {
                Some(row) if view.is_contiguous() => {
                    bench.stretch(&view, view.offset + row * width, width, &mut values)?;
                }
                Some(row) => {
                    for i in 0..width {
                        bench.stretch(&view, view.place(row * width + i), 1, &mut values)?;
                    }
                }
                None if gives_garbage && index >= 0 => {
                    control::complain(format!("row {index} of {rows} was asked for; the result is garbage"));
                    values.extend(std::iter::repeat_n(f32::NAN, width));
                }
                None => crate::codes::fail!(RT_VECTOR_CORE_EXCEPTION, "row {index} of {rows}"),
            }
        }
        bench.store(2, &values)
    };
    let operands = vec![input(0, x), input(1, index), output(0, out)];
    Ok(Prepared::new(operands, kernel).bytes(2 * out.bytes() + index.bytes()))
}

/// Writes the step's keys and values to their slots.
#[allow(clippy::too_many_arguments)]
pub(crate) fn scatter_pa(
    key: &View,
    key_cache: &View,
    slots: &View,
    value: &View,
    value_cache: &View,
    cache_mode: Option<&str>,
    scatter_mode: Option<&str>,
) -> Done<Prepared> {
    rule!(
        matches!(cache_mode, None | Some("Norm" | "")),
        OP_INVALID,
        "cacheMode {cache_mode:?}; \"Norm\" is supported here"
    );
    rule!(
        matches!(scatter_mode, None | Some("None" | "")),
        OP_INVALID,
        "scatterMode {scatter_mode:?}; \"None\" is supported here"
    );
    rule!(
        slots.elem.is_index() && slots.dims.len() == 1,
        OP_INVALID,
        "slotMapping is {:?} {:?}",
        slots.elem,
        slots.dims
    );
    let tokens = slots.dims[0];
    for (rows, cache, what) in [(key, key_cache, "key"), (value, value_cache, "value")] {
        is_one_of(rows, &[Elem::F16, Elem::BF16, Elem::I8], what)?;
        same_elem(rows, cache, what)?;
        is_contiguous(rows, what)?;
        is_contiguous(cache, what)?;
        let fits = rows.dims.len() == 3
            && cache.dims.len() == 4
            && rows.dims[0] == tokens
            && rows.dims[1..] == cache.dims[2..];
        rule!(fits, OP_INVALID, "{what} {:?}, its cache {:?}, {tokens} slots", rows.dims, cache.dims);
    }
    let capacity = key_cache.dims[0] * key_cache.dims[1];
    rule!(value_cache.dims[..2] == key_cache.dims[..2], OP_INVALID, "the caches have different blocks");
    let kernel = move |bench: &mut Bench<'_>| {
        let slots = unique_slots(bench.whole(2)?, capacity)?;
        for (rows, cache) in [(0, 1), (3, 4)] {
            put_rows(bench, rows, cache, &slots)?;
        }
        Ok(())
    };
    let operands = vec![input(0, key), input(1, key_cache), input(2, slots), input(3, value), input(4, value_cache)];
    Ok(Prepared::new(operands, kernel).bytes(2 * (key.bytes() + value.bytes())))
}

/// `cache[indices[i, 0], ..] = updates[i, ..]`.
pub(crate) fn scatter_nd(cache: &View, indices: &View, updates: &View) -> Done<Prepared> {
    rule!(indices.elem.is_index(), OP_INVALID, "indices are {:?}", indices.elem);
    is_one_of(cache, &[Elem::F16, Elem::BF16, Elem::F32, Elem::I64, Elem::Bool, Elem::I8], "varRef")?;
    same_elem(cache, updates, "updates")?;
    is_contiguous(cache, "varRef")?;
    is_contiguous(updates, "updates")?;
    rule!(
        indices.dims.len() == 2 && indices.dims[1] == 1,
        OP_INVALID,
        "indices {:?}; [T,1] is supported here",
        indices.dims
    );
    let tokens = indices.dims[0];
    has_dims(updates, &[&[tokens], &cache.dims[1..]].concat(), "updates")?;
    let capacity = cache.dims[0];
    let kernel = move |bench: &mut Bench<'_>| {
        let slots = unique_slots(bench.whole(1)?, capacity)?;
        put_rows(bench, 2, 0, &slots)
    };
    let operands = vec![input(0, cache), input(1, indices), input(2, updates)];
    Ok(Prepared::new(operands, kernel).bytes(2 * updates.bytes()))
}

/// Slots, each with whether it occurs only once. A slot out of range is a crash.
fn unique_slots(slots: Vec<i64>, capacity: usize) -> Done<Vec<(usize, bool)>> {
    let (mut seen, mut twice) = (HashSet::new(), HashSet::new());
    for &slot in &slots {
        let is_inside = usize::try_from(slot).is_ok_and(|slot| slot < capacity);
        rule!(is_inside, RT_VECTOR_CORE_EXCEPTION, "slot {slot} of {capacity}");
        if !seen.insert(slot) {
            twice.insert(slot);
            control::complain(format!("slot {slot} was written twice by one call; what is stored is undefined"));
        }
    }
    Ok(slots.into_iter().map(|slot| (usize::try_from(slot).unwrap_or(0), !twice.contains(&slot))).collect())
}

/// Copies row i to the i-th slot; slots that occur twice receive garbage.
fn put_rows(bench: &mut Bench<'_>, rows: usize, cache: usize, slots: &[(usize, bool)]) -> Done {
    let (from, to) = (bench.view(rows), bench.view(cache));
    let width = from.bytes() / slots.len();
    let start = |view: &View| view.address + view.offset * view.elem.bits() / 8;
    for (row, &(slot, is_sound)) in slots.iter().enumerate() {
        let target = start(&to) + slot * width;
        if is_sound {
            bench.memory.copy(target, start(&from) + row * width, width)?;
        } else {
            bench.memory.bytes_mut(target, width)?.fill(crate::runtime::memory::POISON);
        }
    }
    Ok(())
}

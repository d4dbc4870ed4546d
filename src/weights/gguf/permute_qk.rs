//! Reorders the rows of query and key projections.
//!
//! Files of some architectures ([`QkRows::InterleavedPairs`](super::QkRows)) are written for a rotary embedding of
//! adjacent elements: within a head of `d` rows, row `2i + s` of the file is row `s * d / 2 + i` of the hub (source:
//! `permute` of llama.cpp's `convert_hf_to_gguf.py`). Only whole rows are moved, so the result is exact in every block
//! format.

#![forbid(unsafe_code)]

use super::metadata::Metadata;
use crate::weights::TensorView;

/// Returns the number of heads of a query or key projection with this name in the file; `None` for other tensors.
pub(super) fn heads(metadata: &Metadata, name: &str) -> Option<Result<usize, String>> {
    let architecture = metadata.architecture()?;
    let (block, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let is_query = match part {
        "attn_q.weight" | "attn_q.bias" => true,
        "attn_k.weight" | "attn_k.bias" => false,
        _ => return None,
    };
    let block: usize = block.parse().ok()?;
    let query_key = format!("{architecture}.attention.head_count");
    let kv_key = format!("{query_key}_kv");
    let count = |key: &str| {
        // The value is one number for all blocks, or an array with one number per block.
        metadata.u32(key).or_else(|| metadata.u32s(key)?.get(block).copied()).map(|count| count as usize)
    };
    let heads = if is_query || metadata.get(&kv_key).is_none() { count(&query_key) } else { count(&kv_key) };
    Some(heads.ok_or_else(|| format!("{query_key} or {kv_key} contains no number of heads for block {block}")))
}

/// Returns the bytes with the rows in the hub's order.
pub(super) fn to_halves(view: TensorView<'_>, heads: usize) -> Result<Box<[u8]>, String> {
    let rows = view.shape.first().copied().unwrap_or(0);
    let is_whole_rows = view.shape.len() == 2 || (view.shape.len() == 1 && !view.dtype.is_quantized());
    if !is_whole_rows || heads == 0 || !rows.is_multiple_of(2 * heads) {
        return Err(format!(
            "got shape {:?} of {}, expected {heads} heads with an even number of rows each",
            view.shape, view.dtype
        ));
    }
    let row_bytes = view.data.len() / rows;
    let half = rows / heads / 2;
    let mut out = Vec::with_capacity(view.data.len());
    for head in view.data.chunks_exact(2 * half * row_bytes) {
        for side in 0..2 {
            for i in 0..half {
                let from = (2 * i + side) * row_bytes;
                out.extend_from_slice(&head[from..from + row_bytes]);
            }
        }
    }
    Ok(out.into_boxed_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::DType;

    #[test]
    fn rows_of_each_head_go_to_halves() {
        // Two heads of four rows of one element each: within a head, the file's order is 0 2 1 3 of the hub's.
        let file: Vec<u8> =
            [0.0_f32, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        for shape in [&[8, 1][..], &[8]] {
            let view = TensorView { dtype: DType::F32, shape, data: &file };
            let data = to_halves(view, 2).unwrap();
            let back = TensorView { data: &data, ..view }.to_f32();
            assert_eq!(back, [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]);
        }
    }

    #[test]
    fn shapes_without_whole_heads_are_an_error() {
        let data = [0; 12];
        let view = TensorView { dtype: DType::F32, shape: &[3], data: &data };
        for heads in [0, 1, 3, usize::MAX / 2] {
            assert!(to_halves(view, heads).is_err(), "{heads}");
        }
    }
}

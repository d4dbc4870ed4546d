//! Fused attention over stored keys and values, paged or contiguous.
//!
//! The accepted arguments depend on CANN's version: the limits are those of the 8.5 and 9.1 documentation, and refusals
//! reported by users.

use super::{has_dims, is_contiguous, is_one_of, same_elem};
use crate::codes::{Done, OP_INVALID, OP_NULL, OP_TILING, fail, rule};
use crate::executor::{Prepared, input, listed, maybe, output};
use crate::operands::Bench;
use crate::settings::Setting;
use crate::tensor::{Elem, View};

/// CANN versions that accept more than earlier ones.
const CANN_8_3: i64 = 80_300_000;
const CANN_9_1: i64 = 90_100_000;

/// Size of the compressed causal mask.
const MASK_SIDE: usize = 2048;

const CAUSAL: i64 = 3;
const BAND: i64 = 4;

/// Arguments supported here; all others must be absent.
pub(crate) struct Call {
    pub(crate) query: View,
    pub(crate) key: View,
    pub(crate) value: View,
    pub(crate) mask: Option<View>,
    pub(crate) query_lens: Option<Vec<i64>>,
    pub(crate) kv_lens: Option<Vec<i64>>,
    pub(crate) table: Option<View>,
    pub(crate) heads: i64,
    pub(crate) kv_heads: i64,
    pub(crate) scale: f64,
    pub(crate) pre_tokens: i64,
    pub(crate) next_tokens: i64,
    pub(crate) layout: String,
    pub(crate) sparse_mode: i64,
    pub(crate) inner_precise: i64,
    pub(crate) block_size: i64,
    pub(crate) out: View,
}

/// One sequence: the first row and the number of its queries, and its stored keys.
#[derive(Clone, Copy, Debug)]
struct Sequence {
    first_query: usize,
    queries: usize,
    /// First key, if the keys of all sequences are consecutive.
    first_key: usize,
    keys: usize,
}

/// Storage of keys and values.
#[derive(Clone, Copy, Debug)]
enum Storage {
    /// `[blocks, block, heads · D]` through a block table.
    TokensFirst,
    /// `[blocks, heads, block, D]` through a block table.
    HeadsFirst,
    /// Rows of all heads, starting at a given row for each sequence.
    Plain { padded: Option<usize> },
}

pub(crate) fn attention(call: Call) -> Done<Prepared> {
    let size = |n: i64, what: &str| match usize::try_from(n) {
        Ok(n) if n > 0 => Ok(n),
        _ => fail!(OP_INVALID, "{what} is {n}"),
    };
    let heads = size(call.heads, "numHeads")?;
    let kv_heads = if call.kv_heads == 0 { heads } else { size(call.kv_heads, "numKeyValueHeads")? };
    rule!(heads.is_multiple_of(kv_heads) && heads <= 256, OP_TILING, "{heads} heads over {kv_heads}; at most 256");
    is_one_of(&call.query, &[Elem::F16, Elem::BF16], "query")?;
    for (view, what) in [(&call.key, "key"), (&call.value, "value"), (&call.out, "attentionOut")] {
        same_elem(&call.query, view, what)?;
        is_contiguous(view, what)?;
    }
    is_contiguous(&call.query, "query")?;
    has_dims(&call.out, &call.query.dims, "attentionOut")?;
    let (head_dim, sequences) = sequences(&call, heads)?;
    let longest = sequences.iter().map(|sequence| sequence.queries).max().unwrap_or(0);
    let storage = storage(&call, kv_heads, head_dim, &sequences)?;
    check_limits(&call, heads, kv_heads, head_dim, longest)?;
    check_mask(&call)?;

    let keys: usize = sequences.iter().map(|sequence| sequence.keys).sum();
    let products: usize = sequences.iter().map(|sequence| sequence.queries * sequence.keys).sum();
    let most_keys = sequences.iter().map(|sequence| sequence.keys).max().unwrap_or(0);
    let kv_bytes = 2 * keys * kv_heads * head_dim * call.key.elem.bits() / 8;
    let bytes = call.query.bytes() + call.out.bytes() + kv_bytes;
    let operands = vec![
        input(0, &call.query),
        listed(1, &call.key),
        listed(2, &call.value),
        maybe(4, call.mask.as_ref()),
        maybe(14, call.table.as_ref()),
        output(0, &call.out),
    ];
    #[allow(clippy::cast_possible_truncation)]
    let shape = Shape {
        heads,
        kv_heads,
        head_dim,
        scale: call.scale as f32,
        sparse_mode: call.sparse_mode,
        pre_tokens: call.pre_tokens,
        next_tokens: call.next_tokens,
        block_size: usize::try_from(call.block_size).unwrap_or(0),
        storage,
    };
    let kernel = move |bench: &mut Bench<'_>| {
        let queries = bench.floats(0)?;
        let table = if bench.has(4) { bench.whole(4)? } else { Vec::new() };
        let mut out = vec![0.0; queries.len()];
        for (at, sequence) in sequences.iter().enumerate() {
            shape.attend(bench, at, sequence, &queries, &table, &mut out)?;
        }
        bench.store(5, &out)
    };
    // The workspace grows with the longest sequence: one captured with short lengths is too small for long ones.
    let workspace = (1 << 16) + 4 * heads * most_keys;
    Ok(Prepared::new(operands, kernel).cube(4 * products * heads * head_dim).bytes(bytes).workspace(workspace))
}

/// Head size and sequences, by the layout's rules for lengths.
fn sequences(call: &Call, heads: usize) -> Done<(usize, Vec<Sequence>)> {
    let dims = &call.query.dims;
    let (batch, tokens, head_dim) = match (call.layout.as_str(), &dims[..]) {
        ("TND", &[tokens, n, d]) if n == heads => (None, tokens, d),
        ("BSND", &[batch, tokens, n, d]) if n == heads => (Some(batch), tokens, d),
        ("BSH", &[batch, tokens, h]) if h.is_multiple_of(heads) => (Some(batch), tokens, h / heads),
        (layout @ ("TND" | "BSND" | "BSH"), _) => fail!(OP_INVALID, "query {dims:?} in {layout} with {heads} heads"),
        (layout, _) => fail!(OP_INVALID, "layout {layout}; TND, BSND and BSH are supported here"),
    };
    let lens = |given: &[i64]| given.iter().map(|&len| usize::try_from(len).ok()).collect::<Option<Vec<usize>>>();
    let Some(kv_lens) = call.kv_lens.as_deref().and_then(lens) else {
        fail!(OP_NULL, "actualSeqLengthsKv is needed, and not negative");
    };
    let count = kv_lens.len();
    let query_lens = match (batch, &call.query_lens) {
        (None, None) => fail!(OP_NULL, "actualSeqLengths is needed in TND"),
        (None, Some(ends)) => match lens(ends) {
            Some(ends) if ends.is_sorted() && ends.last() == Some(&tokens) => differences(&ends),
            _ => fail!(OP_TILING, "actualSeqLengths are sums up to the {tokens} tokens, not {ends:?}"),
        },
        (Some(batch), None) => vec![tokens; batch],
        (Some(_), Some(lens_given)) => match lens(lens_given) {
            Some(lens) if lens.iter().all(|&len| len <= tokens) => lens,
            _ => fail!(OP_TILING, "actualSeqLengths {lens_given:?} of {tokens} tokens"),
        },
    };
    rule!(
        query_lens.len() == count && batch.is_none_or(|batch| batch == count),
        OP_TILING,
        "{} query lengths and {count} key lengths",
        query_lens.len()
    );
    // Without a block table, TND counts keys like queries.
    let keys = if batch.is_none() && call.table.is_none() {
        rule!(kv_lens.is_sorted(), OP_TILING, "actualSeqLengthsKv are sums here, not {kv_lens:?}");
        differences(&kv_lens)
    } else {
        kv_lens
    };
    rule!(keys.iter().all(|&keys| keys > 0), OP_TILING, "a sequence without keys: {keys:?}");
    let (mut first, mut first_key) = (0, 0);
    let mut sequences = Vec::with_capacity(count);
    for (at, (queries, keys)) in query_lens.into_iter().zip(keys).enumerate() {
        let first_query = if batch.is_some() { at * tokens } else { first };
        rule!(
            call.sparse_mode == 0 || queries <= keys,
            OP_TILING,
            "{queries} queries and {keys} keys: the own keys are stored first"
        );
        sequences.push(Sequence { first_query, queries, first_key, keys });
        first += queries;
        first_key += keys;
    }
    Ok((head_dim, sequences))
}

fn differences(sums: &[usize]) -> Vec<usize> {
    let mut before = 0;
    sums.iter().map(|&sum| sum - std::mem::replace(&mut before, sum)).collect()
}

fn storage(call: &Call, kv_heads: usize, head_dim: usize, sequences: &[Sequence]) -> Done<Storage> {
    has_dims(&call.value, &call.key.dims, "value")?;
    let dims = &call.key.dims;
    let Some(table) = &call.table else {
        let total: usize = sequences.iter().map(|sequence| sequence.keys).sum();
        return match (call.layout.as_str(), &dims[..]) {
            ("TND", &[tokens, n, d]) if n == kv_heads && d == head_dim && tokens >= total => {
                Ok(Storage::Plain { padded: None })
            }
            ("BSND", &[batch, tokens, n, d]) if n == kv_heads && d == head_dim && batch == sequences.len() => {
                Ok(Storage::Plain { padded: Some(tokens) })
            }
            _ => fail!(OP_INVALID, "keys {dims:?} for {kv_heads} heads of {head_dim}"),
        };
    };
    let block = usize::try_from(call.block_size).unwrap_or(0);
    let storage = match dims[..] {
        [_, b, h] if b == block && h == kv_heads * head_dim => Storage::TokensFirst,
        [_, n, b, d] if n == kv_heads && b == block && d == head_dim => Storage::HeadsFirst,
        _ => fail!(OP_INVALID, "caches {dims:?} for blocks of {block}, {kv_heads} heads of {head_dim}"),
    };
    rule!(kv_heads * head_dim <= 65_535, OP_TILING, "rows of {} elements", kv_heads * head_dim);
    is_one_of(table, &[Elem::I32], "blockTable")?;
    is_contiguous(table, "blockTable")?;
    let fits = table.dims.len() == 2 && table.dims[0] >= sequences.len();
    rule!(fits, OP_TILING, "block table {:?} for {} sequences", table.dims, sequences.len());
    let most = table.dims[1] * block;
    let is_covered = sequences.iter().all(|sequence| sequence.keys <= most);
    rule!(is_covered, OP_TILING, "the block table has capacity for {most} keys per sequence");
    Ok(storage)
}

fn check_limits(call: &Call, heads: usize, kv_heads: usize, head_dim: usize, longest: usize) -> Done {
    let cann = Setting::cann.get();
    let (is_mha, is_new) = (heads == kv_heads, cann >= CANN_9_1);
    let is_common = matches!(head_dim, 64 | 128);
    rule!(head_dim.is_multiple_of(16) && head_dim <= 512, OP_TILING, "heads of {head_dim}; a multiple of 16 is needed");
    rule!(matches!(call.sparse_mode, 0 | CAUSAL | BAND), OP_TILING, "sparseMode {}", call.sparse_mode);
    rule!(matches!(call.inner_precise, 0 | 1), OP_TILING, "innerPrecise {}", call.inner_precise);
    let block = call.block_size;
    if call.layout == "TND" {
        rule!(cann >= CANN_8_3 || head_dim == 192, OP_TILING, "heads of {head_dim} in TND; before CANN 8.3 only 192");
        rule!(head_dim <= 256, OP_TILING, "heads of {head_dim} in TND; at most 256");
        if is_new {
            let fits = is_common || (!is_mha && call.inner_precise == 0);
            rule!(fits, OP_TILING, "heads of {head_dim} in TND without groups; 64 or 128");
        } else {
            rule!(head_dim < 256, OP_TILING, "heads of 256 in TND before CANN 9.1");
            let is_plain = call.sparse_mode == 0 && call.table.is_none() && call.inner_precise == 1;
            rule!(
                call.query.elem != Elem::F16 || !is_mha || is_plain,
                OP_TILING,
                "f16 without groups in TND before CANN 9.1: neither mask nor pages"
            );
            rule!(
                call.sparse_mode != BAND || call.query.elem == Elem::BF16,
                OP_TILING,
                "a band in TND before CANN 9.1: bf16 only"
            );
        }
        if call.table.is_some() {
            let fits = match (is_new, is_common) {
                (false, _) => block == 128,
                (true, true) => block % 16 == 0 && block <= 1024,
                (true, false) if longest > 1 => block % 128 == 0 && block <= 512,
                (true, false) => block % 16 == 0 && block <= 512,
            };
            rule!(fits, OP_TILING, "blocks of {block} in TND");
        }
        return Ok(());
    }
    rule!(heads * head_dim <= 65_535, OP_TILING, "rows of {} elements", heads * head_dim);
    if call.table.is_some() {
        let most = if is_new && is_common { 1024 } else { 512 };
        let step = if longest > 1 { 128 } else { 16 };
        rule!(
            block % step == 0 && block <= most,
            OP_TILING,
            "blocks of {block} in {}; multiples of {step}",
            call.layout
        );
    }
    Ok(())
}

fn check_mask(call: &Call) -> Done {
    match (&call.mask, call.sparse_mode) {
        (None, 0) => Ok(()),
        (Some(_), 0) => fail!(OP_INVALID, "a whole mask is not supported here"),
        (None, mode) => fail!(OP_NULL, "sparseMode {mode} needs attenMask"),
        (Some(mask), _) => {
            is_one_of(mask, &[Elem::Bool, Elem::I8, Elem::U8], "attenMask")?;
            is_contiguous(mask, "attenMask")?;
            let is_square = mask.dims.ends_with(&[MASK_SIDE, MASK_SIDE]) && mask.count() == MASK_SIDE * MASK_SIDE;
            rule!(is_square, OP_TILING, "attenMask {:?}; {MASK_SIDE} by {MASK_SIDE} is needed", mask.dims);
            rule!(call.sparse_mode != BAND || call.pre_tokens >= 0, OP_TILING, "preTokens {}", call.pre_tokens);
            Ok(())
        }
    }
}

/// Dimensions for the kernel.
#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: f32,
    sparse_mode: i64,
    pre_tokens: i64,
    next_tokens: i64,
    block_size: usize,
    storage: Storage,
}

impl Shape {
    fn attend(
        &self,
        bench: &Bench<'_>,
        at: usize,
        sequence: &Sequence,
        queries: &[f32],
        table: &[i64],
        out: &mut [f32],
    ) -> Done {
        let d = self.head_dim;
        let group = self.heads / self.kv_heads;
        let distances: Vec<bool> = self.visible(bench, sequence)?;
        for kv_head in 0..self.kv_heads {
            let keys = self.gather(bench, 1, at, sequence, kv_head, table)?;
            let values = self.gather(bench, 2, at, sequence, kv_head, table)?;
            for i in 0..sequence.queries {
                // Queries are the last tokens of the sequence.
                let own = sequence.keys + i - sequence.queries.min(sequence.keys + i);
                for head in kv_head * group..(kv_head + 1) * group {
                    let start = ((sequence.first_query + i) * self.heads + head) * d;
                    let query = &queries[start..][..d];
                    let sees = |key: usize| distances[own + sequence.keys - key];
                    let mut weights: Vec<f32> = (0..sequence.keys)
                        .map(|key| {
                            let score = super::dot(query, &keys[key * d..][..d]) * self.scale;
                            if sees(key) { score } else { f32::NEG_INFINITY }
                        })
                        .collect();
                    super::reduce::soften(&mut weights);
                    let mut sums = vec![0.0; d];
                    for (key, &weight) in weights.iter().enumerate().filter(|(key, _)| sees(*key)) {
                        for (sum, value) in sums.iter_mut().zip(&values[key * d..][..d]) {
                            *sum += weight * value;
                        }
                    }
                    out[start..][..d].copy_from_slice(&sums);
                }
            }
        }
        Ok(())
    }

    /// Whether a key is visible, by distance: index `own + keys - key`. Determined by the content of the mask.
    fn visible(&self, bench: &Bench<'_>, sequence: &Sequence) -> Done<Vec<bool>> {
        let keys = sequence.keys;
        let count = 2 * keys + 1;
        if self.sparse_mode == 0 {
            return Ok(vec![true; count]);
        }
        let mask = bench.view(3);
        let bytes = bench.memory.bytes(mask.address + mask.offset, MASK_SIDE * MASK_SIDE)?;
        Ok((0..count)
            .map(|at| {
                let behind = at as i64 - keys as i64;
                let far = usize::try_from(behind.unsigned_abs()).unwrap_or(usize::MAX).min(MASK_SIDE - 1);
                let masked = if behind >= 0 { bytes[far * MASK_SIDE] } else { bytes[far] };
                let in_band = self.sparse_mode != BAND || (behind <= self.pre_tokens && -behind <= self.next_tokens);
                masked == 0 && in_band
            })
            .collect())
    }

    /// Keys or values of one head, `[keys, D]`. Block ids are used without validation.
    fn gather(
        &self,
        bench: &Bench<'_>,
        operand: usize,
        at: usize,
        sequence: &Sequence,
        kv_head: usize,
        table: &[i64],
    ) -> Done<Vec<f32>> {
        let view = bench.view(operand);
        let width = if bench.has(4) { bench.view(4).dims[1] } else { 0 };
        let (d, block) = (self.head_dim, self.block_size);
        let first_key = match self.storage {
            Storage::Plain { padded: Some(tokens) } => at * tokens,
            _ => sequence.first_key,
        };
        let mut rows = Vec::with_capacity(sequence.keys * d);
        for key in 0..sequence.keys {
            let place = match self.storage {
                Storage::Plain { .. } => ((first_key + key) * self.kv_heads + kv_head) * d,
                Storage::TokensFirst | Storage::HeadsFirst => {
                    let id = table[at * width + key / block];
                    let Ok(id) = usize::try_from(id) else {
                        fail!(crate::codes::RT_AICORE_EXCEPTION, "block {id} of sequence {at}");
                    };
                    match self.storage {
                        Storage::TokensFirst => ((id * block + key % block) * self.kv_heads + kv_head) * d,
                        _ => ((id * self.kv_heads + kv_head) * block + key % block) * d,
                    }
                }
            };
            bench.stretch(&view, view.offset + place, d, &mut rows)?;
        }
        Ok(rows)
    }
}

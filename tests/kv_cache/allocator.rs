//! Tests that the allocator never loses a block or hands it out twice, and that a failed call changes nothing.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ascend_llm::kv_cache::{BlockAllocator, BlockError, BlockId, PrefixHit, SeqId};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Traces {
    cases: Vec<Trace>,
}

#[derive(Deserialize)]
struct Trace {
    id: String,
    pool_blocks: u32,
    block_size: u32,
    steps: Vec<TraceStep>,
}

#[derive(Deserialize)]
struct TraceStep {
    op: Vec<Value>,
    result: String,
    free: u32,
}

/// Appends as a scheduler would: admits a new sequence, then makes the blocks of the rows writable.
fn append(blocks: &mut BlockAllocator, seq: SeqId, from: u32, tokens: u32) -> Result<(), BlockError> {
    if blocks.table(seq).is_empty() {
        blocks.admit(seq, &PrefixHit::default(), tokens)
    } else {
        blocks.prepare_rows(seq, from, tokens, &mut Vec::new())
    }
}

fn name(result: Result<(), BlockError>) -> &'static str {
    match result {
        Ok(()) => "ok",
        Err(BlockError::NoSpace { .. }) => "no_space",
        Err(BlockError::UnknownSeq(_)) => "error_unknown",
        Err(_) => "error",
    }
}

#[test]
fn open_traces() {
    let traces: Traces = serde_json::from_str(include_str!("../data/cases/allocator_traces.json")).unwrap();
    assert!(!traces.cases.is_empty());
    for prefix_cache in [false, true] {
        for trace in &traces.cases {
            let mut blocks = BlockAllocator::new(trace.pool_blocks, trace.block_size);
            if prefix_cache {
                blocks = blocks.with_prefix_cache(1);
            }
            let mut lengths: BTreeMap<SeqId, u32> = BTreeMap::new();
            for (at, step) in trace.steps.iter().enumerate() {
                let seq = |arg: usize| SeqId(u64::from(step.op[arg].as_str().unwrap().as_bytes()[0]));
                let before = format!("{blocks:?}");
                let result = match step.op[0].as_str().unwrap() {
                    "append" => {
                        let had = lengths.get(&seq(1)).copied().unwrap_or(0);
                        let tokens = had + u32::try_from(step.op[2].as_u64().unwrap()).unwrap();
                        let result = append(&mut blocks, seq(1), had, tokens);
                        if result.is_ok() {
                            lengths.insert(seq(1), tokens);
                        }
                        result
                    }
                    "fork" => {
                        lengths.insert(seq(2), lengths[&seq(1)]);
                        blocks.fork(seq(1), seq(2))
                    }
                    "free" => {
                        lengths.remove(&seq(1));
                        blocks.release(seq(1))
                    }
                    other => panic!("unknown operation {other}"),
                };
                blocks.check().unwrap();
                if result.is_err() {
                    assert_eq!(
                        format!("{blocks:?}"),
                        before,
                        "{}: the failed call at step {at} changed the pool",
                        trace.id
                    );
                }
                assert_eq!(
                    (name(result), blocks.available()),
                    (step.result.as_str(), step.free),
                    "{}: wrong result at step {at}",
                    trace.id
                );
            }
            assert_eq!(blocks.available(), trace.pool_blocks, "{}: blocks leaked", trace.id);
        }
    }
}

#[test]
fn the_whole_pool_can_be_asked_for_and_not_a_block_more() {
    let mut blocks = BlockAllocator::new(4, 4);
    let full = BlockError::NoSpace { needed_blocks: 5, available_blocks: 4 };
    assert_eq!(blocks.admit(SeqId(0), &PrefixHit::default(), 17), Err(full));
    blocks.admit(SeqId(0), &PrefixHit::default(), 16).unwrap();
    assert_eq!(blocks.stats().live_blocks, 4);
    let full = BlockError::NoSpace { needed_blocks: 1, available_blocks: 0 };
    assert_eq!(blocks.grow(SeqId(0), 17), Err(full));
    blocks.check().unwrap();
}

#[test]
fn a_stale_hit_is_refused() {
    let mut blocks = BlockAllocator::new(2, 4).with_prefix_cache(1);
    let tokens = [1, 2, 3, 4, 5];
    blocks.admit(SeqId(0), &blocks.lookup(&tokens, b""), 4).unwrap();
    blocks.publish(SeqId(0), &tokens[..4]);
    blocks.release(SeqId(0)).unwrap();
    let hit = blocks.lookup(&tokens, b"");
    assert_eq!(hit.tokens(), 4);
    assert_eq!(blocks.admit(SeqId(1), &hit, 3), Ok(()), "3 tokens fit into the block of the hit");
    blocks.release(SeqId(1)).unwrap();
    assert_eq!(blocks.admit(SeqId(1), &hit, 0), Err(BlockError::HitTooLong { hit_tokens: 4, tokens: 0 }));
    blocks.admit(SeqId(2), &PrefixHit::default(), 8).unwrap();
    blocks.release(SeqId(2)).unwrap();
    assert!(matches!(blocks.admit(SeqId(1), &hit, 8), Err(BlockError::StaleHit(_))));
    assert!(matches!(BlockAllocator::new(2, 4).admit(SeqId(1), &hit, 8), Err(BlockError::StaleHit(_))));
    blocks.check().unwrap();
}

#[test]
fn overwriting_a_published_block_takes_it_out_of_the_cache() {
    let mut blocks = BlockAllocator::new(4, 2).with_prefix_cache(1);
    let tokens = [1, 2, 3, 4, 5];
    blocks.admit(SeqId(0), &blocks.lookup(&tokens, b""), 4).unwrap();
    blocks.publish(SeqId(0), &tokens[..4]);
    assert_eq!(blocks.lookup(&tokens, b"").tokens(), 4);
    let mut copies = Vec::new();
    blocks.make_writable(SeqId(0), 3, &mut copies).unwrap();
    blocks.check().unwrap();
    assert!(copies.is_empty());
    assert_eq!(blocks.lookup(&tokens, b"").tokens(), 2);
    let rewritten = [1, 2, 3, 9, 5];
    blocks.publish(SeqId(0), &rewritten[..4]);
    blocks.check().unwrap();
    assert_eq!(blocks.lookup(&rewritten, b"").tokens(), 4);
    assert_eq!(blocks.lookup(&tokens, b"").tokens(), 2);
}

#[derive(Clone, Debug)]
enum Op {
    Admit { seq: u64, prompt: usize, extra: u32 },
    Append { seq: u64, tokens: u32 },
    Rewind { seq: u64, back: u32 },
    Fork { parent: u64, child: u64 },
    Release { seq: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0u64..6, 0usize..4, 0u32..6).prop_map(|(seq, prompt, extra)| Op::Admit { seq, prompt, extra }),
        5 => (0u64..6, 1u32..6).prop_map(|(seq, tokens)| Op::Append { seq, tokens }),
        1 => (0u64..6, 1u32..4).prop_map(|(seq, back)| Op::Rewind { seq, back }),
        2 => (0u64..6, 0u64..6).prop_map(|(parent, child)| Op::Fork { parent, child }),
        3 => (0u64..6).prop_map(|seq| Op::Release { seq }),
    ]
}

/// Oracle: the tokens of each sequence, and the token last written to each slot of the pool.
#[derive(Default)]
struct Oracle {
    seqs: HashMap<u64, Vec<u32>>,
    slots: HashMap<(BlockId, u32), u32>,
}

impl Oracle {
    fn write(&mut self, blocks: &BlockAllocator, seq: u64, from: usize) {
        for (at, &token) in self.seqs[&seq].iter().enumerate().skip(from) {
            self.slots.insert(slot(blocks, seq, at), token);
        }
    }
}

fn slot(blocks: &BlockAllocator, seq: u64, at: usize) -> (BlockId, u32) {
    let block_size = blocks.block_size() as usize;
    (blocks.table(SeqId(seq))[at / block_size], (at % block_size) as u32)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn random_traces_agree_with_the_oracle(
        ops in prop::collection::vec(op(), 1..80),
        pool in 3u32..14,
        block_size in 1u32..5,
        prefix_cache: bool,
    ) {
        let mut blocks = BlockAllocator::new(pool, block_size);
        if prefix_cache {
            blocks = blocks.with_prefix_cache(9);
        }
        let prompts: [Vec<u32>; 4] = [vec![1; 9], vec![1, 1, 1, 1, 1, 1, 2, 2, 2], vec![3; 4], vec![1, 1, 1, 1]];
        let mut oracle = Oracle::default();
        let mut fresh = 100u32;
        for op in ops {
            let before = format!("{blocks:?}");
            let available = blocks.available();
            let mut copies = Vec::new();
            let result = match op {
                Op::Admit { seq, prompt, extra } => {
                    let tokens = &prompts[prompt];
                    let hit = blocks.lookup(tokens, b"");
                    prop_assert!(hit.tokens() < tokens.len() as u32 && hit.tokens().is_multiple_of(block_size));
                    prop_assert!(prefix_cache || hit.tokens() == 0);
                    let room = tokens.len() as u32 + extra;
                    let known = oracle.seqs.contains_key(&seq);
                    let needed = blocks.admission_blocks(&hit, room);
                    let result = blocks.admit(SeqId(seq), &hit, room);
                    prop_assert_eq!(result.is_ok(), !known && needed <= available);
                    if result.is_ok() {
                        prop_assert_eq!(blocks.available(), available - needed);
                        prop_assert!(hit.blocks().eq(blocks.table(SeqId(seq))[..hit.blocks().len()].iter().copied()));
                        oracle.seqs.insert(seq, tokens.clone());
                        oracle.write(&blocks, seq, hit.tokens() as usize);
                        blocks.publish(SeqId(seq), tokens);
                    }
                    result
                }
                Op::Append { seq, tokens } => {
                    let had = oracle.seqs.get(&seq).map_or(0, Vec::len);
                    let total = had as u32 + tokens;
                    let result = blocks.prepare_rows(SeqId(seq), had as u32, total, &mut copies);
                    if result.is_ok() {
                        for (from, to) in copies.drain(..) {
                            for offset in 0..block_size {
                                if let Some(&token) = oracle.slots.get(&(from, offset)) {
                                    oracle.slots.insert((to, offset), token);
                                }
                            }
                        }
                        // Half of the appended tokens are equal, so that different sequences contain the same content.
                        let appended = (0..tokens).map(|i| if fresh.is_multiple_of(2) { 1 } else { fresh + i });
                        oracle.seqs.get_mut(&seq).unwrap().extend(appended);
                        fresh += 1;
                        oracle.write(&blocks, seq, had);
                        blocks.publish(SeqId(seq), &oracle.seqs[&seq]);
                    }
                    result
                }
                Op::Rewind { seq, back } => {
                    let had = oracle.seqs.get(&seq).map_or(0, |tokens| tokens.len() as u32);
                    let from = had.saturating_sub(back);
                    let result = blocks.make_writable(SeqId(seq), from, &mut copies);
                    if result.is_ok() {
                        for (from, to) in copies.drain(..) {
                            for offset in 0..block_size {
                                if let Some(&token) = oracle.slots.get(&(from, offset)) {
                                    oracle.slots.insert((to, offset), token);
                                }
                            }
                        }
                        for token in &mut oracle.seqs.get_mut(&seq).unwrap()[from as usize..] {
                            *token = 7;
                        }
                        oracle.write(&blocks, seq, from as usize);
                        blocks.publish(SeqId(seq), &oracle.seqs[&seq]);
                    }
                    result
                }
                Op::Fork { parent, child } => {
                    let possible = oracle.seqs.contains_key(&parent) && !oracle.seqs.contains_key(&child);
                    let result = blocks.fork(SeqId(parent), SeqId(child));
                    prop_assert_eq!(result.is_ok(), possible);
                    if possible {
                        prop_assert_eq!(blocks.available(), available);
                        let tokens = oracle.seqs[&parent].clone();
                        oracle.seqs.insert(child, tokens);
                    }
                    result
                }
                Op::Release { seq } => {
                    let result = blocks.release(SeqId(seq));
                    prop_assert_eq!(result.is_ok(), oracle.seqs.remove(&seq).is_some());
                    result
                }
            };
            blocks.check().map_err(TestCaseError::fail)?;
            if result.is_err() {
                prop_assert_eq!(format!("{blocks:?}"), before, "a failed call changed the pool");
                prop_assert!(copies.is_empty());
            }
            let mut distinct: BTreeSet<BlockId> = BTreeSet::new();
            for (&seq, tokens) in &oracle.seqs {
                distinct.extend(blocks.table(SeqId(seq)));
                prop_assert!(blocks.table(SeqId(seq)).len() as u32 * block_size >= tokens.len() as u32);
                for (at, &token) in tokens.iter().enumerate() {
                    prop_assert_eq!(oracle.slots[&slot(&blocks, seq, at)], token, "wrong token of sequence {} at row {}", seq, at);
                }
            }
            let stats = blocks.stats();
            prop_assert_eq!(stats.live_blocks as usize, distinct.len());
            prop_assert_eq!(stats.free_blocks + stats.cached_blocks + stats.live_blocks, pool);
            prop_assert!(prefix_cache || stats.cached_blocks == 0);
        }
        for seq in oracle.seqs.keys() {
            blocks.release(SeqId(*seq)).unwrap();
        }
        blocks.check().map_err(TestCaseError::fail)?;
        prop_assert_eq!(blocks.available(), pool);
    }
}

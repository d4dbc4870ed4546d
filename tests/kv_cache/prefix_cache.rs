//! Tests that the prefix cache changes only which rows are computed, never the output.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use crate::common::digest_model::{Rig, oracle_output};
use ascend_llm::kv_cache::{BlockAllocator, PrefixHasher, SeqId};
use ascend_llm::scheduler::{NewSequence, Scheduler, SchedulerConfig};
use proptest::prelude::*;
use serde::Deserialize;

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    id: String,
    block_size: u32,
    requests: Vec<CaseRequest>,
}

#[derive(Deserialize)]
struct CaseRequest {
    prompt: Vec<u32>,
    #[serde(default)]
    lora: String,
    expect_cached_tokens: u32,
}

fn cases() -> Vec<Case> {
    let cases: Cases = serde_json::from_str(include_str!("../data/cases/prefix_cache.json")).unwrap();
    assert!(!cases.cases.is_empty());
    cases.cases
}

fn scheduler(budget: u32, max_num_seqs: u32) -> Scheduler {
    Scheduler::new(SchedulerConfig::new(budget, max_num_seqs, 4_096).with_max_logit_rows(u32::MAX)).unwrap()
}

fn meta(prompt: &[u32], salt: &[u8], max_tokens: u32) -> NewSequence {
    NewSequence::new(prompt.to_vec(), max_tokens).with_salt(salt.into())
}

/// Runs one request in a batch of its own, compares it with the model without cache, and returns its cached tokens.
fn run_alone(rig: &mut Rig, id: u64, prompt: &[u32], salt: &[u8], max_tokens: u32) -> u32 {
    rig.add(id, meta(prompt, salt, max_tokens)).unwrap();
    rig.drain();
    let expected_seq = rig.finished(id);
    assert_eq!(expected_seq.output, oracle_output(prompt, salt, max_tokens), "wrong output of request {id}");
    expected_seq.cached_tokens
}

fn constant_digest(_parent: u128, _tokens: &[u32]) -> u128 {
    7
}

/// Returns one of only two keys, so that contents collide at all depths.
fn coarse_digest(parent: u128, tokens: &[u32]) -> u128 {
    (parent ^ u128::from(tokens.iter().fold(0u32, |sum, token| sum ^ token))) & 1
}

#[test]
fn every_case_at_every_chunk_size() {
    for case in cases() {
        for chunk in [3, 5, case.block_size, case.block_size + 1, 1_000] {
            let blocks = BlockAllocator::new(64, case.block_size).with_prefix_cache(1);
            let mut rig = Rig::new(scheduler(chunk, 1), blocks);
            for (id, request) in case.requests.iter().enumerate() {
                let cached = run_alone(&mut rig, id as u64, &request.prompt, request.lora.as_bytes(), 1);
                assert_eq!(
                    cached, request.expect_cached_tokens,
                    "{}: wrong cached tokens of request {id} with chunks of {chunk}",
                    case.id
                );
            }
        }
    }
}

#[test]
fn colliding_keys_cost_hits_and_never_answers() {
    for digest in [constant_digest, coarse_digest] {
        for case in cases() {
            let keyer = PrefixHasher::with_digest(1, digest);
            let blocks = BlockAllocator::new(64, case.block_size).with_prefix_keyer(keyer);
            let mut rig = Rig::new(scheduler(5, 1), blocks);
            for (id, request) in case.requests.iter().enumerate() {
                let cached = run_alone(&mut rig, id as u64, &request.prompt, request.lora.as_bytes(), 9);
                assert!(cached <= request.expect_cached_tokens, "{}: too many cached tokens of request {id}", case.id);
            }
        }
    }
}

#[test]
fn a_collision_hides_the_newcomer_and_serves_the_first() {
    let keyer = PrefixHasher::with_digest(1, constant_digest);
    let mut rig = Rig::new(scheduler(64, 1), BlockAllocator::new(16, 4).with_prefix_keyer(keyer));
    let (first, second) = ([1, 2, 3, 4, 5], [9, 9, 9, 9, 9]);
    assert_eq!(run_alone(&mut rig, 0, &first, b"", 1), 0);
    assert_eq!(run_alone(&mut rig, 1, &second, b"", 1), 0);
    assert_eq!(run_alone(&mut rig, 2, &second, b"", 1), 0, "another content already has the key");
    assert_eq!(run_alone(&mut rig, 3, &first, b"", 1), 4);
    assert_eq!(run_alone(&mut rig, 4, &first, b"other", 1), 0, "the same key with another salt is no hit");
}

#[test]
fn the_chain_goes_on_across_chunks() {
    let prompt: Vec<u32> = (0..200).collect();
    for chunk in [1, 7, 16, 64, 199, 512] {
        let mut rig = Rig::new(scheduler(chunk, 1), BlockAllocator::new(40, 16).with_prefix_cache(1));
        assert_eq!(run_alone(&mut rig, 0, &prompt, b"", 1), 0);
        assert_eq!(run_alone(&mut rig, 1, &prompt, b"", 1), 192, "wrong cached tokens with chunks of {chunk}");
    }
}

#[test]
fn smaller_blocks_find_more() {
    for (block_size, expected) in [(16, 96), (128, 0)] {
        let mut rig = Rig::new(scheduler(64, 1), BlockAllocator::new(40, block_size).with_prefix_cache(1));
        let shared: Vec<u32> = (0..100).collect();
        run_alone(&mut rig, 0, &[&shared[..], &[7; 30]].concat(), b"", 1);
        let queried = rig.blocks.stats().queried_tokens;
        assert_eq!(run_alone(&mut rig, 1, &[&shared[..], &[8; 30]].concat(), b"", 1), expected);
        let stats = rig.blocks.stats();
        assert_eq!((stats.queried_tokens - queried, stats.hit_tokens), (130, u64::from(expected)));
    }
}

#[test]
fn output_tokens_are_found_by_the_next_turn() {
    let mut rig = Rig::new(scheduler(64, 1), BlockAllocator::new(40, 4).with_prefix_cache(1));
    let prompt: Vec<u32> = (10..16).collect();
    run_alone(&mut rig, 0, &prompt, b"", 10);
    // The sequence has 6 + 10 tokens. The last one was sampled but not computed, so 15 rows exist: 3 full blocks.
    let next_turn = [&prompt[..], &oracle_output(&prompt, b"", 10), &[77, 78]].concat();
    assert_eq!(run_alone(&mut rig, 1, &next_turn, b"", 3), 12);
}

#[test]
fn an_evicted_block_is_not_found_again() {
    // The pool has 6 blocks: A leaves 5 cached ones, and B needs all of them.
    let mut rig = Rig::new(scheduler(64, 1), BlockAllocator::new(6, 4).with_prefix_cache(1));
    let (a, b): (Vec<u32>, Vec<u32>) = ((0..20).collect(), (100..124).collect());
    run_alone(&mut rig, 0, &a, b"", 2);
    assert_eq!(rig.blocks.stats().cached_blocks, 5);
    run_alone(&mut rig, 1, &b, b"", 1);
    assert_eq!(rig.blocks.stats().evicted_blocks, 5);
    assert_eq!(run_alone(&mut rig, 2, &a, b"", 2), 0);
    assert_eq!(run_alone(&mut rig, 3, &a, b"", 2), 16);
}

#[test]
fn the_tail_of_a_chain_is_given_up_before_its_head() {
    let mut rig = Rig::new(scheduler(64, 1), BlockAllocator::new(6, 4).with_prefix_cache(1));
    let a: Vec<u32> = (0..20).collect();
    run_alone(&mut rig, 0, &a, b"", 1);
    run_alone(&mut rig, 1, &[50; 12], b"", 1);
    // One block was free, so B evicted two of A's five: the last two.
    assert_eq!(run_alone(&mut rig, 2, &a, b"", 1), 12);
}

#[test]
fn two_thousand_prompts_pass_through_a_pool_of_a_hundred() {
    let mut rig = Rig::new(scheduler(256, 8), BlockAllocator::new(100, 4).with_prefix_cache(1));
    for id in 0..2_000u32 {
        let prompt: Vec<u32> = (0..13).map(|i| id * 100 + i).collect();
        rig.add(u64::from(id), meta(&prompt, b"", 3)).unwrap();
    }
    rig.drain();
    for id in 0..2_000u32 {
        let expected_seq = rig.finished(u64::from(id));
        assert_eq!(expected_seq.output, oracle_output(&expected_seq.prompt, b"", 3));
    }
    assert!(rig.blocks.stats().evicted_blocks > 5_000);
}

#[test]
fn live_gauge_is_zero_when_idle_and_cached_blocks_are_a_second_gauge() {
    let mut rig = Rig::new(scheduler(64, 4), BlockAllocator::new(32, 4).with_prefix_cache(1));
    for id in 0..5 {
        run_alone(&mut rig, id, &[id as u32; 9], b"", 2);
        let stats = rig.blocks.stats();
        assert_eq!((stats.live_blocks, stats.cached_blocks), (0, 2 * (id as u32 + 1)));
    }
}

#[test]
fn bypassing_reads_still_publishes() {
    let mut rig = Rig::new(scheduler(64, 1), BlockAllocator::new(32, 4).with_prefix_cache(1));
    let prompt: Vec<u32> = (0..9).collect();
    for id in 0..2 {
        rig.add(id, meta(&prompt, b"t", 1).with_read_prefix_cache(false)).unwrap();
        rig.drain();
        assert_eq!(rig.finished(id).cached_tokens, 0);
    }
    assert_eq!(rig.blocks.stats().queried_tokens, 0);
    assert_eq!(run_alone(&mut rig, 2, &prompt, b"t", 1), 8);
    assert_eq!(run_alone(&mut rig, 3, &prompt, b"", 1), 0, "another salt is no hit");
}

#[test]
fn of_two_equal_contents_the_first_stays_and_the_other_is_freed() {
    let mut rig = Rig::new(scheduler(64, 2), BlockAllocator::new(32, 4).with_prefix_cache(1));
    let prompt: Vec<u32> = (0..9).collect();
    rig.add(0, meta(&prompt, b"", 1)).unwrap();
    rig.add(1, meta(&prompt, b"", 1)).unwrap();
    rig.drain();
    let stats = rig.blocks.stats();
    assert_eq!((stats.cached_blocks, stats.free_blocks), (2, 30));
}

#[test]
fn a_duplicate_is_offered_again_when_the_first_has_gone() {
    let mut blocks = BlockAllocator::new(7, 2).with_prefix_cache(1);
    let (a, b, other) = (SeqId(0), SeqId(1), SeqId(2));
    let tokens = [1, 2, 3, 4, 5, 6, 7];
    let miss = blocks.lookup(&tokens, b"");
    blocks.admit(a, &miss, 4).unwrap();
    blocks.admit(b, &miss, 6).unwrap();
    blocks.publish(a, &tokens[..4]);
    blocks.publish(b, &tokens[..4]);
    blocks.release(a).unwrap();
    blocks.admit(other, &blocks.lookup(&[9; 8], b""), 8).unwrap();
    assert_eq!(blocks.stats().evicted_blocks, 2, "both blocks of `a` are evicted");
    assert_eq!(blocks.lookup(&tokens, b"").tokens(), 0);
    blocks.publish(b, &tokens[..6]);
    blocks.check().unwrap();
    assert_eq!(blocks.lookup(&tokens, b"").tokens(), 6);
    assert_eq!(blocks.lookup(&tokens, b"").blocks().collect::<Vec<_>>(), blocks.table(b));
}

#[test]
fn an_orphan_gives_its_key_to_a_content_that_can_be_reached() {
    // The second block of `b` has the first block of `a` as its parent. The first block of `a` is evicted, then the
    // same content is computed again.
    let mut blocks = BlockAllocator::new(4, 2).with_prefix_cache(1);
    let (a, b, c) = (SeqId(0), SeqId(1), SeqId(2));
    let tokens = [1, 2, 3, 4, 5];
    let miss = blocks.lookup(&tokens, b"");
    blocks.admit(a, &miss, 2).unwrap();
    blocks.admit(b, &miss, 4).unwrap();
    blocks.publish(a, &tokens[..2]);
    blocks.publish(b, &tokens[..4]);
    blocks.release(a).unwrap();
    blocks.admit(c, &miss, 4).unwrap();
    assert_eq!(blocks.lookup(&tokens, b"").tokens(), 0);
    blocks.publish(c, &tokens[..4]);
    blocks.check().unwrap();
    assert_eq!(blocks.lookup(&tokens, b"").blocks().collect::<Vec<_>>(), blocks.table(c));
    blocks.release(b).unwrap();
    blocks.release(c).unwrap();
    blocks.check().unwrap();
    assert_eq!((blocks.stats().free_blocks, blocks.stats().cached_blocks), (2, 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The output of each request equals that without cache, also after sharing, eviction and preemption.
    ///
    /// The test uses few tokens, few salts, a tight pool, and good and bad digest functions.
    #[test]
    fn outputs_do_not_depend_on_the_cache(
        prompts in prop::collection::vec((prop::collection::vec(0u32..2, 1..24), 0u8..2, 1u32..12), 1..14),
        pool in 9u32..24,
        block_size in 2u32..6,
        budget in 4u32..20,
        digest in 0..4,
    ) {
        let blocks = BlockAllocator::new(pool, block_size);
        let blocks = match digest {
            0 => blocks,
            1 => blocks.with_prefix_cache(3),
            2 => blocks.with_prefix_keyer(PrefixHasher::with_digest(3, constant_digest)),
            _ => blocks.with_prefix_keyer(PrefixHasher::with_digest(3, coarse_digest)),
        };
        let mut rig = Rig::new(scheduler(budget, 4), blocks);
        let mut taken = Vec::new();
        for (id, (prompt, salt, max_tokens)) in prompts.iter().enumerate() {
            let fits = (prompt.len() as u32).div_ceil(block_size) <= pool;
            let added = rig.add(id as u64, meta(prompt, &[*salt], *max_tokens));
            prop_assert_eq!(added.is_ok(), fits);
            if fits {
                taken.push(id);
            }
            rig.step();
        }
        rig.drain();
        for id in taken {
            let (prompt, salt, max_tokens) = &prompts[id];
            let (expected_seq, _) = &rig.done[&SeqId(id as u64)];
            let expected = oracle_output(prompt, &[*salt], *max_tokens);
            // A sequence larger than the pool ends early, with a correct output up to that point.
            let slots = pool * block_size;
            let said = (*max_tokens).min((slots + 1).saturating_sub(prompt.len() as u32));
            prop_assert_eq!(&expected_seq.output, &expected[..said as usize]);
        }
    }
}

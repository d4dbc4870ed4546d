//! Bookkeeping of KV blocks: cost of a sequence when it is added, grows, shares a prefix and is freed.
//!
//! `elem/s` are blocks, or sequences where the number of blocks does not matter.

use std::hint::black_box;

use ascend_llm::kv_cache::{BlockAllocator, PrefixHit, SeqId};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

use ascend_llm_benches::{Noise, bench_aging};

const BLOCK_SIZE: u32 = 16;
const PROMPT_TOKENS: u32 = 1024;
const PROMPT_BLOCKS: u64 = (PROMPT_TOKENS / BLOCK_SIZE) as u64;

fn prompt() -> Vec<u32> {
    Noise(1).ids(PROMPT_TOKENS as usize, 49_152)
}

/// A pool that has computed `tokens` for one sequence.
fn cached_pool(tokens: &[u32]) -> BlockAllocator {
    let mut blocks = BlockAllocator::new(4096, BLOCK_SIZE).with_prefix_cache(1);
    blocks.admit(SeqId(0), &PrefixHit::miss(b""), PROMPT_TOKENS).expect("free blocks");
    blocks.publish(SeqId(0), tokens);
    blocks
}

fn come_and_go(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocator");
    group.throughput(Throughput::Elements(PROMPT_BLOCKS));

    let mut blocks = BlockAllocator::new(4096, BLOCK_SIZE);
    let miss = PrefixHit::miss(b"");
    group.bench_function("admit_release/1024_tokens", |b| {
        b.iter(|| {
            blocks.admit(SeqId(1), &miss, PROMPT_TOKENS).expect("free blocks");
            blocks.release(SeqId(1)).expect("it holds blocks");
        });
    });

    // Every prompt is new and the pool holds only a few: each iteration looks up, publishes and evicts 64 blocks.
    let mut blocks = BlockAllocator::new(256, BLOCK_SIZE).with_prefix_cache(1);
    let (mut tokens, mut hit) = (prompt(), PrefixHit::default());
    group.bench_function("admit_publish_release_evicting/1024_tokens", |b| {
        b.iter(|| {
            tokens[0] = tokens[0].wrapping_add(1);
            blocks.lookup_into(&tokens, b"", &mut hit);
            blocks.admit(SeqId(1), &hit, PROMPT_TOKENS).expect("free blocks");
            blocks.publish(SeqId(1), &tokens);
            blocks.release(SeqId(1)).expect("it holds blocks");
        });
    });

    // A prompt that was computed before: all but its last block are found.
    let tokens = prompt();
    let mut blocks = cached_pool(&tokens);
    group.bench_function("lookup_hit/1024_tokens", |b| {
        b.iter(|| blocks.lookup_into(black_box(&tokens), b"", &mut hit));
    });
    group.bench_function("admit_hit_release/1024_tokens", |b| {
        b.iter(|| {
            blocks.lookup_into(&tokens, b"", &mut hit);
            blocks.admit(SeqId(1), &hit, PROMPT_TOKENS).expect("free blocks");
            blocks.release(SeqId(1)).expect("it holds blocks");
        });
    });

    // A second output of one prompt writes to the shared last block.
    let mut copies = Vec::new();
    group.bench_function("fork_write_release/1024_tokens", |b| {
        b.iter(|| {
            copies.clear();
            blocks.fork(SeqId(0), SeqId(1)).expect("a new sequence");
            blocks.make_writable(SeqId(1), PROMPT_TOKENS - 1, &mut copies).expect("free blocks");
            assert_eq!(copies.len(), 1);
            blocks.release(SeqId(1)).expect("it holds blocks");
        });
    });
    group.finish();
}

/// Adds one token to each of 64 sequences: one in sixteen needs a new block.
fn grow(c: &mut Criterion) {
    const SEQS: u64 = 64;
    const LIFE: u32 = 4096;
    let mut group = c.benchmark_group("allocator");
    group.throughput(Throughput::Elements(SEQS));
    let capacity = u32::try_from(SEQS).expect("a small number") * (LIFE / BLOCK_SIZE + 1);
    let renew = || {
        let mut blocks = BlockAllocator::new(capacity, BLOCK_SIZE);
        for seq in 0..SEQS {
            // Different lengths, so that blocks fill up in different steps.
            let tokens = 1 + u32::try_from(seq).expect("a small number") % BLOCK_SIZE;
            blocks.admit(SeqId(seq), &PrefixHit::miss(b""), tokens).expect("free blocks");
            blocks.reserve_table(SeqId(seq), LIFE + BLOCK_SIZE).expect("it is there");
        }
        (blocks, 0)
    };
    group.bench_function("grow/64_sequences", |b| {
        bench_aging(b, u64::from(LIFE), renew, |(blocks, step)| {
            *step += 1;
            for seq in 0..SEQS {
                let tokens = 1 + u32::try_from(seq).expect("a small number") % BLOCK_SIZE + *step;
                blocks.grow(SeqId(seq), tokens).expect("free blocks");
            }
        });
    });
    group.finish();
}

criterion_group!(name = benches; config = ascend_llm_benches::criterion(); targets = come_and_go, grow);
criterion_main!(benches);

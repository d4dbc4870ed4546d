//! Tests of a runner in a host's own loop: a batch with inconsistent lists is rejected, and the next valid batch runs.

#![allow(missing_docs)]

use std::path::Path;

use ascend_llm::device::DeviceError;
use ascend_llm::engine::{CacheBudget, Engine, EngineConfig};
use ascend_llm::kv_cache::BlockId;
use ascend_llm::runner::{ForwardInput, ModelExecutor as _};

fn good() -> ForwardInput {
    ForwardInput::new(vec![17, 101, 127, 5], vec![3, 1], vec![3, 1], vec![BlockId(0), BlockId(1)])
        .with_logit_rows(vec![2, 3])
}

#[test]
fn batches_whose_lists_disagree_are_refused() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conformance/llama-gqa-tied");
    let mut config = EngineConfig::default();
    (config.max_num_seqs, config.max_num_batched_tokens) = (4, 16);
    config.kv_cache = CacheBudget::Blocks(4);
    let mut runner = Engine::builder(folder).config(config).build_runner().unwrap();
    let expected = runner.forward(good()).unwrap().logits.logits.to_vec();

    let broken: [fn(&mut ForwardInput); 16] = [
        |batch| batch.f32_fallback_from = vec![Some(0)],
        |batch| batch.f32_fallback_from = vec![Some(1), Some(0)],
        |batch| batch.logit_rows = vec![3, 2],
        |batch| batch.logit_rows = vec![2, 4],
        |batch| batch.q_lens[0] = 0,
        |batch| batch.q_lens[0] = 4,
        |batch| batch.kv_lens[0] = 2,
        |batch| batch.kv_lens[1] = u32::MAX,
        |batch| batch.kv_lens.truncate(1),
        |batch| batch.q_lens.push(1),
        |batch| batch.tables.truncate(1),
        |batch| batch.tables.push(BlockId(2)),
        |batch| batch.tables[0] = BlockId(4),
        |batch| batch.tokens[1] = 160,
        |batch| batch.tokens.extend([0; 13]),
        |batch| batch.logit_rows[1] = 4,
    ];
    for (case, break_it) in broken.iter().enumerate() {
        let mut batch = good();
        break_it(&mut batch);
        let outcome = runner.forward(batch).map(|rows| rows.logits.vocab);
        assert!(matches!(outcome, Err(DeviceError::Invalid { .. })), "case {case}: {outcome:?}");
        assert!(runner.forward(good()).unwrap().logits.logits == expected, "after case {case}");
    }
}

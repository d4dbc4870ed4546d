//! Engines around a scripted model, for the tests of the loop.

#![allow(dead_code)] // each test file uses a part

use std::sync::Arc;

use ascend_llm::engine::{CacheBudget, EngineConfig, EngineCore, ManualClock, ModelLimits, Output, RequestHandle};
use ascend_llm::runner::ModelExecutor;
use ascend_llm::runner::scripted::ScriptedForward;
use ascend_llm::text::Vocabulary;

/// Tokens a block in all these tests.
pub const BLOCK: u32 = 16;

/// A small engine's parts, to be changed before [`core`](Rig::core).
#[derive(Debug)]
pub struct Rig {
    pub config: EngineConfig,
    pub model: ModelLimits,
    pub vocabulary: Option<Arc<dyn Vocabulary>>,
    pub clock: ManualClock,
}

impl Rig {
    pub fn new(vocab_size: u32, blocks: u32) -> Self {
        let mut config = EngineConfig::default();
        config.max_num_batched_tokens = 64;
        config.max_num_seqs = 8;
        config.kv_cache = CacheBudget::Blocks(blocks);
        config.block_size = Some(BLOCK);
        Self { config, model: ModelLimits::new(vocab_size, 256), vocabulary: None, clock: ManualClock::new() }
    }

    pub fn blocks(&self) -> u32 {
        match self.config.kv_cache {
            CacheBudget::Blocks(blocks) => blocks,
            other => panic!("a rig's pool is counted in blocks, not {other:?}"),
        }
    }

    pub fn hashed(&self) -> ScriptedForward {
        ScriptedForward::hashed(self.model.vocab_size, self.blocks(), BLOCK)
    }

    pub fn core(&self, forward: impl ModelExecutor + 'static) -> EngineCore {
        EngineCore::from_parts(
            self.config.clone(),
            Box::new(forward),
            self.model.clone(),
            self.vocabulary.clone(),
            None,
            Arc::new(self.clock.clone()),
        )
        .unwrap()
    }
}

/// Steps until nothing is left, checking every invariant on the way.
pub fn drain(core: &mut EngineCore) -> usize {
    let mut steps = 0;
    while !core.is_idle() {
        core.step().unwrap();
        core.check().unwrap();
        steps += 1;
        assert!(steps < 100_000, "the engine does not come to an end");
    }
    assert_at_rest(core);
    steps
}

/// Nothing runs, nothing waits, every block is free or cached.
pub fn assert_at_rest(core: &EngineCore) {
    core.check().unwrap();
    let stats = core.stats();
    assert_eq!((stats.queued_requests, stats.running, stats.waiting, stats.live_blocks), (0, 0, 0, 0), "{stats:?}");
    let CacheBudget::Blocks(blocks) = core.config().kv_cache else { panic!("settled to blocks") };
    assert_eq!(stats.free_blocks + stats.cached_blocks, u64::from(blocks), "{stats:?}");
}

/// Runs the engine empty and gives the handle's whole output.
pub fn finish(core: &mut EngineCore, handle: RequestHandle) -> Output {
    drain(core);
    handle.collect_output().unwrap()
}

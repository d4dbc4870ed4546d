//! Engines with a scripted model, for the tests of the engine loop.

#![allow(dead_code)] // each test binary uses only a part

use std::sync::Arc;

use ascend_llm::engine::{CacheBudget, EngineConfig, EngineCore, ManualClock, ModelLimits, Output, RequestHandle};
use ascend_llm::runner::ModelExecutor;
use ascend_llm::runner::scripted::ScriptedForward;
use ascend_llm::text::Vocabulary;

/// Block size in all these tests.
pub const BLOCK: u32 = 16;

/// Parts of a small engine; a test can change them before it calls [`core`](Rig::core).
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
            other => panic!("the pool of a rig must be given in blocks, not as {other:?}"),
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

/// Runs steps until no work is left, and checks every invariant after each step.
pub fn drain(core: &mut EngineCore) -> usize {
    let mut steps = 0;
    while !core.is_idle() {
        core.step().unwrap();
        core.check().unwrap();
        steps += 1;
        assert!(steps < 100_000, "the engine does not become idle");
    }
    assert_at_rest(core);
    steps
}

/// Checks that no sequence is running or waiting, and that every block is free or cached.
pub fn assert_at_rest(core: &EngineCore) {
    core.check().unwrap();
    let stats = core.stats();
    assert_eq!((stats.queued_requests, stats.running, stats.waiting, stats.live_blocks), (0, 0, 0, 0), "{stats:?}");
    let CacheBudget::Blocks(blocks) = core.config().kv_cache else {
        panic!("the configuration does not give the pool in blocks")
    };
    assert_eq!(stats.free_blocks + stats.cached_blocks, u64::from(blocks), "{stats:?}");
}

/// Runs the engine until it is idle, and returns the whole output of the handle.
pub fn finish(core: &mut EngineCore, handle: RequestHandle) -> Output {
    drain(core);
    handle.collect_output().unwrap()
}

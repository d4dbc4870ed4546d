//! Which tokens end generation.

/// Union of the end-of-sequence ids of the model's config, its generation config and its tokenizer, ascending.
pub fn stop_ids(config: &[u32], generation: &[u32], tokenizer: &[u32]) -> Vec<u32> {
    let mut ids: Vec<u32> = config.iter().chain(generation).chain(tokenizer).copied().collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

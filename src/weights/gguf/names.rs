//! Translation of tensor names between GGUF and the hub.
//!
//! The translation is a one-to-one table, so a source can look up either name without a second map.

#![forbid(unsafe_code)]

/// Table of an architecture's tensor names: pairs of (GGUF, hub), without `.weight` or `.bias`.
#[derive(Debug)]
pub struct NameTable {
    /// Prefix of a layer's number on the hub.
    pub layers: &'static str,
    /// Tensors outside the layers, which occur once.
    pub whole: &'static [(&'static str, &'static str)],
    /// Tensors of each layer: the prefix is `blk.N.` in a file, and `layers` and the number on the hub.
    pub block: &'static [(&'static str, &'static str)],
}

/// Tensors that occur once in nearly every architecture.
const WHOLE: &[(&str, &str)] =
    &[("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

impl NameTable {
    /// Table of Llama and similar models: one norm before attention, one before the MLP.
    pub const PRE_NORM: Self = Self {
        layers: "model.layers",
        whole: WHOLE,
        block: &[
            ("attn_norm", "input_layernorm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("attn_q_norm", "self_attn.q_norm"),
            ("attn_k_norm", "self_attn.k_norm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ],
    };

    /// Table of Gemma 2 and 3: norms before and after attention and MLP, so `ffn_norm` is another norm than in Llama.
    pub const PRE_AND_POST_NORM: Self = Self {
        layers: "model.layers",
        whole: WHOLE,
        block: &[
            ("attn_norm", "input_layernorm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("attn_q_norm", "self_attn.q_norm"),
            ("attn_k_norm", "self_attn.k_norm"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
    };

    /// Returns the hub name of a GGUF name; `None` if the hub has no such tensor (`rope_freqs.weight`).
    pub fn to_hub(&self, gguf: &str) -> Option<String> {
        let (stem, suffix) = split_suffix(gguf)?;
        if let Some((block, part)) = split_block(stem, "blk") {
            let (_, hub) = self.block.iter().find(|(gguf, _)| *gguf == part)?;
            return Some(format!("{}.{block}.{hub}.{suffix}", self.layers));
        }
        let (_, hub) = self.whole.iter().find(|(gguf, _)| *gguf == stem)?;
        Some(format!("{hub}.{suffix}"))
    }

    /// Returns the GGUF name of a hub name.
    pub fn to_gguf(&self, hub: &str) -> Option<String> {
        let (stem, suffix) = split_suffix(hub)?;
        if let Some((block, part)) = split_block(stem, self.layers) {
            let (gguf, _) = self.block.iter().find(|(_, hub)| *hub == part)?;
            return Some(format!("blk.{block}.{gguf}.{suffix}"));
        }
        let (gguf, _) = self.whole.iter().find(|(_, hub)| *hub == stem)?;
        Some(format!("{gguf}.{suffix}"))
    }

    /// Returns whether no two tensors have the same name.
    #[cfg(test)]
    pub(crate) fn is_one_to_one(&self) -> bool {
        let differ = |a: &(&str, &str), b: &(&str, &str)| a.0 != b.0 && a.1 != b.1;
        let apart = |pairs: &[_]| pairs.iter().enumerate().all(|(i, a)| pairs[i + 1..].iter().all(|b| differ(a, b)));
        apart(self.whole) && apart(self.block)
    }
}

fn split_suffix(name: &str) -> Option<(&str, &str)> {
    name.rsplit_once('.').filter(|(_, suffix)| matches!(*suffix, "weight" | "bias"))
}

/// Splits `blk.12.attn_q` into 12 and `attn_q`. It accepts only the canonical spelling of the number, so that the
/// translation back yields the same name.
fn split_block<'a>(stem: &'a str, prefix: &str) -> Option<(u32, &'a str)> {
    let (digits, part) = stem.strip_prefix(prefix)?.strip_prefix('.')?.split_once('.')?;
    let block: u32 = digits.parse().ok()?;
    (block.to_string() == digits).then_some((block, part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_names_translate() {
        for (gguf, hub) in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
            ("blk.1.attn_k.bias", "model.layers.1.self_attn.k_proj.bias"),
            ("blk.2.attn_v.weight", "model.layers.2.self_attn.v_proj.weight"),
            ("blk.30.attn_output.weight", "model.layers.30.self_attn.o_proj.weight"),
            ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
            ("blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
            ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
            ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
            ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight"),
            ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"),
            ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ] {
            assert_eq!(NameTable::PRE_NORM.to_hub(gguf).as_deref(), Some(hub));
            assert_eq!(NameTable::PRE_NORM.to_gguf(hub).as_deref(), Some(gguf));
        }
    }

    #[test]
    fn unknown_and_odd_names_do_not_translate() {
        for name in
            ["rope_freqs.weight", "blk.01.attn_q.weight", "blk.x.attn_q.weight", "blk.0.attn_q", "attn_q.weight", ""]
        {
            assert_eq!(NameTable::PRE_NORM.to_hub(name), None, "{name}");
        }
        assert_eq!(NameTable::PRE_NORM.to_gguf("model.layers.+1.self_attn.q_proj.weight"), None);
    }

    #[test]
    fn tables_are_one_to_one() {
        assert!(NameTable::PRE_NORM.is_one_to_one() && NameTable::PRE_AND_POST_NORM.is_one_to_one());
    }
}

//! The graph of a Llama-shaped decoder: all architectures here differ from it by biases, head norms and windows only.

use super::error::invalid;
use super::{ModelConfig, ModelError};
use crate::graph::{
    AttentionShape, CustomSite, Graph, GraphBuilder, LinearPart, NormSpec, RegisteredOp, RopeFrequencies, ValueId,
    Weight, WeightId, WeightRole,
};
use crate::num::to_u32;
use crate::weights::WeightSource;

/// Builds the graph of one step, naming the weights as the hub does and taking their types from the source.
///
/// # Errors
/// [`ModelError::MissingTensor`] and [`ModelError::TensorShape`] for tensors that are absent or of another shape.
pub fn decoder_graph(config: &ModelConfig, source: &dyn WeightSource) -> Result<Graph, ModelError> {
    decoder_graph_with(config, source, &[])
}

/// The same with operations of the user's own in their places.
///
/// # Errors
/// Also [`ModelError::Custom`] for a place that the model has not.
pub fn decoder_graph_with(
    config: &ModelConfig,
    source: &dyn WeightSource,
    customs: &[RegisteredOp],
) -> Result<Graph, ModelError> {
    config.validate()?;
    for RegisteredOp { site, op } in customs {
        if let CustomSite::AfterLayer(layer) = site
            && *layer as usize >= config.layers
        {
            let (name, layers) = (op.name().to_owned(), config.layers);
            return Err(ModelError::Custom { name, site: *site, layers });
        }
    }
    let mut builder = TransformerBuilder { config, source, customs, graph: GraphBuilder::new() };
    builder.build()
}

struct TransformerBuilder<'a> {
    config: &'a ModelConfig,
    source: &'a dyn WeightSource,
    customs: &'a [RegisteredOp],
    graph: GraphBuilder,
}

impl TransformerBuilder<'_> {
    fn build(&mut self) -> Result<Graph, ModelError> {
        let c = self.config;
        let embedding = self.matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size)?;
        let mut x = self.graph.embed(embedding, "x");
        let rope = self.rope_frequencies()?;
        let angles = self.graph.rope_angles(rope, "angles");
        x = self.customs_at(CustomSite::AfterEmbedding, x);

        for layer in 0..c.layers {
            self.graph.set_layer(Some(to_u32(layer)));
            let prefix = format!("model.layers.{layer}");
            let norm = self.norm(&format!("{prefix}.input_layernorm.weight"), c.hidden_size)?;
            let h = self.graph.rms_norm(x, norm, "attn_in");
            let a = self.attention(&prefix, layer, h, angles)?;
            let x_mid = self.graph.add(x, a, "x_mid");
            let norm = self.norm(&format!("{prefix}.post_attention_layernorm.weight"), c.hidden_size)?;
            let h = self.graph.rms_norm(x_mid, norm, "mlp_in");
            let m = self.mlp(&prefix, h)?;
            x = self.graph.add(x_mid, m, "x_out");
            x = self.customs_at(CustomSite::AfterLayer(to_u32(layer)), x);
        }

        self.graph.set_layer(None);
        let rows = self.graph.gather_rows(x, "wanted");
        let norm = self.norm("model.norm.weight", c.hidden_size)?;
        let h = self.graph.rms_norm(rows, norm, "final");
        let head =
            if c.tied_embeddings { embedding } else { self.matrix("lm_head.weight", c.vocab_size, c.hidden_size)? };
        let logits = self.graph.linear(h, LinearPart { weight: head, bias: None }, "logits");
        Ok(std::mem::take(&mut self.graph).finish(x, logits))
    }

    /// x after the user's operations of this place.
    fn customs_at(&mut self, site: CustomSite, x: ValueId) -> ValueId {
        let here = self.customs.iter().filter(|custom| custom.site == site).enumerate();
        here.fold(x, |x, (index, custom)| self.graph.custom(x, custom.clone(), &format!("custom{index}")))
    }

    fn attention(&mut self, prefix: &str, layer: usize, h: ValueId, angles: ValueId) -> Result<ValueId, ModelError> {
        let c = self.config;
        let (q_width, kv_width) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let mut project =
            |name: &str, n: usize, bias: bool| self.part(&format!("{prefix}.self_attn.{name}"), n, c.hidden_size, bias);
        let (q_part, k_part, v_part) = (
            project("q_proj", q_width, c.qkv_bias)?,
            project("k_proj", kv_width, c.qkv_bias)?,
            project("v_proj", kv_width, c.qkv_bias)?,
        );
        let mut q = self.graph.linear(h, q_part, "q");
        let mut k = self.graph.linear(h, k_part, "k");
        let v = self.graph.linear(h, v_part, "v");
        if c.qk_norm {
            let norm = self.norm(&format!("{prefix}.self_attn.q_norm.weight"), c.head_dim)?;
            q = self.graph.rms_norm(q, norm, "q_normed");
            let norm = self.norm(&format!("{prefix}.self_attn.k_norm.weight"), c.head_dim)?;
            k = self.graph.rms_norm(k, norm, "k_normed");
        }
        let q = self.graph.rope(q, angles, c.head_dim, c.rope.style, "q_rot");
        let k = self.graph.rope(k, angles, c.head_dim, c.rope.style, "k_rot");
        let stored = self.graph.kv_write(k, v, layer, "kv");
        let shape = AttentionShape {
            layer,
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            scale: 1.0 / (c.head_dim as f32).sqrt(),
            window: c.windows[layer],
            schedules: None,
        };
        let a = self.graph.attention(q, stored, shape, "attn");
        let part = self.part(&format!("{prefix}.self_attn.o_proj"), c.hidden_size, q_width, c.output_bias)?;
        Ok(self.graph.linear(a, part, "attn_out"))
    }

    fn mlp(&mut self, prefix: &str, h: ValueId) -> Result<ValueId, ModelError> {
        let c = self.config;
        let gate = self.part(&format!("{prefix}.mlp.gate_proj"), c.intermediate_size, c.hidden_size, c.mlp_bias)?;
        let up = self.part(&format!("{prefix}.mlp.up_proj"), c.intermediate_size, c.hidden_size, c.mlp_bias)?;
        let down = self.part(&format!("{prefix}.mlp.down_proj"), c.hidden_size, c.intermediate_size, c.mlp_bias)?;
        let gate = self.graph.linear(h, gate, "gate");
        let up = self.graph.linear(h, up, "up");
        let act = self.graph.activation(gate, c.activation, "act");
        let product = self.graph.mul(act, up, "act_up");
        Ok(self.graph.linear(product, down, "mlp_out"))
    }

    fn rope_frequencies(&self) -> Result<RopeFrequencies, ModelError> {
        let rope = &self.config.rope;
        let (mut inv_freq, attention_factor) = rope.scaling.inv_freq(rope.dim, rope.theta);
        if let Some(divisors) = &rope.divisors {
            if divisors.len() != inv_freq.len() || !divisors.iter().all(|d| d.is_finite() && *d > 0.0) {
                let expected = format!("{} finite divisors above 0", inv_freq.len());
                return Err(invalid("rope_freqs.weight", format!("{} values", divisors.len()), &expected));
            }
            inv_freq.iter_mut().zip(divisors).for_each(|(f, d)| *f /= d);
        }
        Ok(RopeFrequencies { inv_freq, attention_factor })
    }

    fn part(&mut self, name: &str, n: usize, k: usize, bias: bool) -> Result<LinearPart, ModelError> {
        let weight = self.matrix(&format!("{name}.weight"), n, k)?;
        let bias = if bias { Some(self.vector(&format!("{name}.bias"), n)?) } else { None };
        Ok(LinearPart { weight, bias })
    }

    fn norm(&mut self, name: &str, group: usize) -> Result<NormSpec, ModelError> {
        Ok(NormSpec { weight: self.vector(name, group)?, eps: self.config.rms_norm_eps, group })
    }

    fn matrix(&mut self, name: &str, n: usize, k: usize) -> Result<WeightId, ModelError> {
        self.weight(name, vec![n, k], WeightRole::Matrix)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<WeightId, ModelError> {
        self.weight(name, vec![len], WeightRole::Vector)
    }

    fn weight(&mut self, name: &str, shape: Vec<usize>, role: WeightRole) -> Result<WeightId, ModelError> {
        let tensor = self.source.require(name).map_err(|error| ModelError::from_tensor(name, &error))?;
        if tensor.shape != shape {
            return Err(ModelError::TensorShape { name: name.to_owned(), got: tensor.shape.to_vec(), expected: shape });
        }
        Ok(self.graph.weight(Weight { name: name.to_owned(), shape, dtype: tensor.dtype, role, slice: None }))
    }
}

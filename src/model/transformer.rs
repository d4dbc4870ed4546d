//! Builds a model's graph from its configuration, layer by layer, without any code for a single family.

use super::config::{
    AttentionConfig, GatedMlp, GroupedQueryAttention, LayerConfig, MlpConfig, NormConfig, NormPlacement, OutputHead,
    QkNorm,
};
use super::error::invalid;
use super::{ModelConfig, ModelError, RopeConfig};
use crate::graph::{
    AttentionShape, CustomSite, Graph, GraphBuilder, LinearPart, NormSpec, RegisteredOp, RopeFrequencies, ValueId,
    Weight, WeightId, WeightRole,
};
use crate::num::to_u32;
use crate::weights::WeightSource;

/// Builds the graph of one step.
///
/// The weights have their hub names, and their types are those of the source.
///
/// # Errors
/// [`ModelError::InvalidField`] if the configuration is invalid; [`ModelError::MissingTensor`],
/// [`ModelError::UnusableTensor`] or [`ModelError::TensorShape`] if a tensor is missing, cannot be used, or has another
/// shape.
pub fn decoder_graph(config: &ModelConfig, source: &dyn WeightSource) -> Result<Graph, ModelError> {
    decoder_graph_with(config, source, &[])
}

/// Builds the graph of one step with custom operations at their sites.
///
/// # Errors
/// The errors of [`decoder_graph`]; [`ModelError::Custom`] if the model does not have the site of an operation.
pub fn decoder_graph_with(
    config: &ModelConfig,
    source: &dyn WeightSource,
    customs: &[RegisteredOp],
) -> Result<Graph, ModelError> {
    config.validate()?;
    for RegisteredOp { site, op } in customs {
        if let CustomSite::AfterLayer(layer) = site
            && *layer as usize >= config.layers.len()
        {
            let (name, layers) = (op.name().to_owned(), config.layers.len());
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
        let embedding = self.matrix(c.tensors.embedding, c.vocab_size, c.hidden_size)?;
        let mut x = self.graph.embed(embedding, "x");
        if let Some(factor) = c.embedding_scale {
            x = self.graph.scale(x, factor, "x_scaled");
        }
        let angles = c.ropes.iter().enumerate().map(|(index, rope)| self.rope_angles(index, rope));
        let angles = angles.collect::<Result<Vec<_>, _>>()?;
        x = self.customs_at(CustomSite::AfterEmbedding, x);

        for (index, layer) in c.layers.iter().enumerate() {
            self.graph.set_layer(Some(to_u32(index)));
            x = self.layer(index, layer, x, &angles)?;
            x = self.customs_at(CustomSite::AfterLayer(to_u32(index)), x);
        }

        self.graph.set_layer(None);
        let rows = self.graph.gather_rows(x, "wanted");
        let mut h = self.norm(c.tensors.final_norm, c.final_norm, rows, c.hidden_size, "final")?;
        if let Some(factor) = c.logit_scale {
            // The head is linear, so its input is scaled instead of its output, because the input is narrower.
            h = self.graph.scale(h, factor, "final_scaled");
        }
        let head = match c.head {
            OutputHead::Tied => embedding,
            OutputHead::Untied => self.matrix(c.tensors.head, c.vocab_size, c.hidden_size)?,
        };
        let logits = self.graph.linear(h, LinearPart { weight: head, bias: None }, "logits");
        Ok(std::mem::take(&mut self.graph).finish(x, logits))
    }

    fn layer(
        &mut self,
        index: usize,
        layer: &LayerConfig,
        x: ValueId,
        angles: &[ValueId],
    ) -> Result<ValueId, ModelError> {
        let (hidden, names) = (self.config.hidden_size, self.config.tensors);
        let prefix = format!("{}.{index}", names.layers);
        let NormPlacement::Pre(norm) = layer.norms;
        let h = self.norm(&format!("{prefix}.{}", names.attention_norm), norm, x, hidden, "attn_in")?;
        let AttentionConfig::GroupedQuery(attention) = &layer.attention;
        let mut a = self.attention(&prefix, index, attention, h, angles)?;
        if let Some(factor) = layer.residual_scale {
            a = self.graph.scale(a, factor, "attn_scaled");
        }
        let x_mid = self.graph.add(x, a, "x_mid");
        let h = self.norm(&format!("{prefix}.{}", names.mlp_norm), norm, x_mid, hidden, "mlp_in")?;
        let mut m = self.mlp(&prefix, &layer.mlp, h)?;
        if let Some(factor) = layer.residual_scale {
            m = self.graph.scale(m, factor, "mlp_scaled");
        }
        Ok(self.graph.add(x_mid, m, "x_out"))
    }

    /// Appends the custom operations of a site to `x`.
    fn customs_at(&mut self, site: CustomSite, x: ValueId) -> ValueId {
        let here = self.customs.iter().filter(|custom| custom.site == site).enumerate();
        here.fold(x, |x, (index, custom)| self.graph.custom(x, custom.clone(), &format!("custom{index}")))
    }

    fn attention(
        &mut self,
        prefix: &str,
        layer: usize,
        attention: &GroupedQueryAttention,
        h: ValueId,
        angles: &[ValueId],
    ) -> Result<ValueId, ModelError> {
        let GroupedQueryAttention { heads, kv_heads, head_dim, qkv_bias, output_bias, .. } = *attention;
        let (hidden, names) = (self.config.hidden_size, self.config.tensors);
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let mut project = |name: &str, n: usize| self.part(&format!("{prefix}.{name}"), n, hidden, qkv_bias);
        let (q_part, k_part, v_part) =
            (project(names.query, q_width)?, project(names.key, kv_width)?, project(names.value, kv_width)?);
        let mut q = self.graph.linear(h, q_part, "q");
        let mut k = self.graph.linear(h, k_part, "k");
        let v = self.graph.linear(h, v_part, "v");
        if let Some(QkNorm::EachHead(norm)) = attention.qk_norm {
            q = self.norm(&format!("{prefix}.{}", names.query_norm), norm, q, head_dim, "q_normed")?;
            k = self.norm(&format!("{prefix}.{}", names.key_norm), norm, k, head_dim, "k_normed")?;
        }
        if let Some(rope) = attention.rope {
            let style = self.config.ropes[rope].style;
            q = self.graph.rope(q, angles[rope], head_dim, style, "q_rot");
            k = self.graph.rope(k, angles[rope], head_dim, style, "k_rot");
        }
        let stored = self.graph.kv_write(k, v, layer, "kv");
        let GroupedQueryAttention { scale, window, .. } = *attention;
        let shape = AttentionShape { layer, heads, kv_heads, head_dim, scale, window, schedules: None };
        let a = self.graph.attention(q, stored, shape, "attn");
        let part = self.part(&format!("{prefix}.{}", names.attention_output), hidden, q_width, output_bias)?;
        Ok(self.graph.linear(a, part, "attn_out"))
    }

    fn mlp(&mut self, prefix: &str, mlp: &MlpConfig, h: ValueId) -> Result<ValueId, ModelError> {
        let (hidden, names) = (self.config.hidden_size, self.config.tensors);
        let MlpConfig::Gated(GatedMlp { intermediate_size, activation, bias }) = *mlp;
        let gate = self.part(&format!("{prefix}.{}", names.gate), intermediate_size, hidden, bias)?;
        let up = self.part(&format!("{prefix}.{}", names.up), intermediate_size, hidden, bias)?;
        let down = self.part(&format!("{prefix}.{}", names.down), hidden, intermediate_size, bias)?;
        let gate = self.graph.linear(h, gate, "gate");
        let up = self.graph.linear(h, up, "up");
        let act = self.graph.activation(gate, activation, "act");
        let product = self.graph.mul(act, up, "act_up");
        Ok(self.graph.linear(product, down, "mlp_out"))
    }

    fn rope_angles(&mut self, index: usize, rope: &RopeConfig) -> Result<ValueId, ModelError> {
        let (mut inv_freq, attention_factor) = rope.scaling.inv_freq(rope.dim, rope.theta);
        if let Some(divisors) = &rope.divisors {
            if divisors.len() != inv_freq.len() || !divisors.iter().all(|d| d.is_finite() && *d > 0.0) {
                let expected = format!("{} finite divisors above 0", inv_freq.len());
                return Err(invalid("rope_freqs.weight", format!("{} values", divisors.len()), &expected));
            }
            inv_freq.iter_mut().zip(divisors).for_each(|(f, d)| *f /= d);
        }
        let tag = if index == 0 { "angles".to_owned() } else { format!("angles{index}") };
        Ok(self.graph.rope_angles(RopeFrequencies { inv_freq, attention_factor }, &tag))
    }

    fn part(&mut self, name: &str, n: usize, k: usize, bias: bool) -> Result<LinearPart, ModelError> {
        let weight = self.matrix(name, n, k)?;
        let bias = if bias { Some(self.vector(&format!("{name}.bias"), n)?) } else { None };
        Ok(LinearPart { weight, bias })
    }

    /// Adds the norm of `x` over groups of `group` elements.
    fn norm(
        &mut self,
        name: &str,
        norm: NormConfig,
        x: ValueId,
        group: usize,
        tag: &str,
    ) -> Result<ValueId, ModelError> {
        let NormConfig::Rms { eps } = norm;
        let weight = self.vector(&format!("{name}.weight"), group)?;
        Ok(self.graph.rms_norm(x, NormSpec { weight, eps, group }, tag))
    }

    fn matrix(&mut self, name: &str, n: usize, k: usize) -> Result<WeightId, ModelError> {
        self.weight(&format!("{name}.weight"), vec![n, k], WeightRole::Matrix)
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

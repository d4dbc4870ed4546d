//! Options of the graph compiler as options of a command line.

use std::collections::BTreeMap;

use ascend_llm::graph::{CompileOptions, Precision};

use crate::terminal::Result;

/// Options of the graph compiler.
#[derive(Clone, Debug, clap::Args)]
pub struct CompileArgs {
    /// Optimization level, 0 to 3: a preset for the options below. Default: that of the compiler.
    #[arg(long)]
    pub opt_level: Option<u8>,
    /// Fusion level, 0 to 3.
    #[arg(long)]
    pub fusion: Option<u8>,
    /// Maximum number of operations that run concurrently, 1 to 4.
    #[arg(long)]
    pub parallel_ops: Option<u8>,
    /// Type that activations are rounded to: f32, bf16, f16 or mix, followed by exceptions for projections, as in
    /// `f16,lm_head=f32,layers.0.mlp.down_proj=bf16`.
    #[arg(long, value_delimiter = ',')]
    pub precision: Vec<String>,
}

impl CompileArgs {
    /// The options in the form of the compiler.
    pub fn options(&self) -> Result<CompileOptions> {
        let mut options = CompileOptions::default();
        (options.opt_level, options.fusion, options.parallel_ops) = (self.opt_level, self.fusion, self.parallel_ops);
        let mut overrides = BTreeMap::new();
        for text in &self.precision {
            match text.split_once('=') {
                Some((name, precision)) => drop(overrides.insert(name.to_owned(), parse(precision)?)),
                None => options.precision = Some(parse(text)?),
            }
        }
        options.precision_overrides = overrides;
        Ok(options)
    }
}

fn parse(text: &str) -> Result<Precision> {
    let precision = serde_json::from_value(serde_json::Value::String(text.to_owned()));
    precision.map_err(|_| format!("--precision {text}: expected f32, bf16, f16 or mix").into())
}

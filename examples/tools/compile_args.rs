//! Compiler options as command-line options.

use ascend_llm::graph::{CompileOptions, Precision};

use crate::terminal::Result;

/// Options of the graph compiler.
#[derive(Clone, Debug, clap::Args)]
pub struct CompileArgs {
    /// Preset of the options below, 0 to 3 [default: the compiler's].
    #[arg(long)]
    pub opt_level: Option<u8>,
    /// Fusion level, 0 to 3.
    #[arg(long)]
    pub fusion: Option<u8>,
    /// Maximum number of operations that run in parallel, 1 to 4.
    #[arg(long)]
    pub parallel_ops: Option<u8>,
    /// Precision of activations in matrix products: `f32`, `bf16`, `f16` or `mix`. Exceptions by projection follow, as in
    /// `f16,lm_head=f32,layers.0.mlp.down_proj=bf16`.
    #[arg(long, value_delimiter = ',')]
    pub precision: Vec<String>,
}

impl CompileArgs {
    /// The library's form of these options.
    ///
    /// # Errors
    /// A sentence about a precision that cannot be parsed.
    pub fn options(&self) -> Result<CompileOptions> {
        let mut options = CompileOptions::default();
        (options.opt_level, options.fusion, options.parallel_ops) = (self.opt_level, self.fusion, self.parallel_ops);
        for text in &self.precision {
            match text.split_once('=') {
                Some((name, precision)) => {
                    options.precision_overrides.insert(name.to_owned(), parse(precision)?);
                }
                None => options.precision = Some(parse(text)?),
            }
        }
        Ok(options)
    }
}

fn parse(text: &str) -> Result<Precision> {
    let precision = serde_json::from_value(serde_json::Value::String(text.to_owned()));
    precision.map_err(|_| format!("--precision {text}: expected f32, bf16, f16 or mix").into())
}

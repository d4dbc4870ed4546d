//! Shared parts of the command-line tools around `ascend-llm`.

pub mod arena_map;
pub mod compile_args;
#[path = "../terminal/op_table.rs"]
pub mod op_table;
#[path = "../terminal/mod.rs"]
pub mod terminal;
pub mod throughput_chart;

use std::path::Path;

use ascend_llm::graph::{Graph, Numerics};
use ascend_llm::kv_cache::KvDType;
use ascend_llm::model::{self, ModelConfig, config_from_gguf, config_from_hub, decoder_graph};
use ascend_llm::text::Tokenizer;
use ascend_llm::weights::ModelKind;

use terminal::{ModelArgs, Result};

/// Reads a model's configuration and builds its graph; no weight is read.
///
/// # Errors
/// The library's error for a model that it cannot open, read or build.
pub fn graph(path: &Path) -> Result<(ModelConfig, Graph)> {
    let files = model::open(path)?;
    let config = match &files.kind {
        ModelKind::Gguf(file) => config_from_gguf(file)?,
        ModelKind::Folder(folder) => config_from_hub(&std::fs::read(folder.join("config.json"))?)?,
        _ => return Err("this tool does not support the model's file format".into()),
    };
    let graph = decoder_graph(&config, files.source.as_ref())?;
    Ok((config, graph))
}

/// Reads a model's tokenizer.
///
/// # Errors
/// The library's error, or a sentence if the model has no tokenizer.
pub fn tokenizer(path: &Path) -> Result<Tokenizer> {
    match &model::open(path)?.kind {
        ModelKind::Gguf(file) => Ok(Tokenizer::from_gguf(file.metadata())?),
        ModelKind::Folder(folder) => {
            let file = folder.join("tokenizer.json");
            let json = std::fs::read(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
            let config = std::fs::read(folder.join("tokenizer_config.json")).ok();
            Ok(Tokenizer::from_json(&json, config.as_deref())?)
        }
        _ => Err("this tool does not support the model's file format".into()),
    }
}

/// Bytes of an element of the KV cache with the given options.
pub fn kv_element_bytes(args: &ModelArgs) -> u64 {
    let default = if args.numerics == Some(Numerics::Exact) { KvDType::F32 } else { KvDType::F16 };
    args.kv_dtype.unwrap_or(default).bytes() as u64
}

/// Name of the model: the file's or folder's name without the extension.
pub fn model_name(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".to_owned(), |stem| stem.to_string_lossy().into_owned())
}

/// Describes the machine: processor, logical processors, operating system.
pub fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let processor = processor.map_or("unknown processor", |(_, name)| name);
    let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    let plural = if count == 1 { "" } else { "s" };
    format!("{processor}, {count} logical processor{plural}, {os} {arch}")
}

/// Bytes in MiB.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

//! What the examples share: opening a model with a progress bar, the options all of them take, peak memory.
#![allow(dead_code)] // each example uses its own part

pub mod compile_args;
pub mod op_table;
pub mod plot;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ascend_llm::device::Device;
use ascend_llm::device::cpu::{CpuDevice, CpuOptions, Isa};
use ascend_llm::engine::{Engine, EngineBuilder, EngineConfig, EngineCore, LoadProgress};
use ascend_llm::graph::{Graph, Numerics};
use ascend_llm::kv_cache::KvDType;
use ascend_llm::model::{self, ModelConfig, config_from_gguf, config_from_hub, decoder_graph};
use ascend_llm::runner::ModelRunner;
use ascend_llm::weights::ModelKind;
use indicatif::{ProgressBar, ProgressStyle};

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The story model that comes with the crate.
pub fn story_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/fable-f16.gguf")
}

/// Options every example takes.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelArgs {
    /// Folder with safetensors, or a .gguf file; the small story model if left out.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Threads; as many as this process may use if left out.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Instruction-set path of the CPU device; the best this machine has if left out.
    #[arg(long, value_parser = ["plain", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "neon", "neon_dot"])]
    pub isa: Option<String>,
    /// Device to run on; ascend-sim is the Ascend device over the simulated runtime (`ASCEND_SIM_LIBRARY`, or what cargo
    /// built beside this program).
    #[arg(long, default_value = "cpu", value_parser = ["cpu", "ascend", "ascend-sim"])]
    pub device: String,
    /// Ranks to cut the model into: a card each on an Ascend device, one after the other on a CPU. Of plans the first rank's is shown.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks: u32,
    /// Arithmetic: exact (f32 throughout) or fast (int8 activations for integer weights, 16-bit keys and values).
    #[arg(long, value_parser = ["exact", "fast"])]
    pub numerics: Option<String>,
    /// What keys and values are stored as; f32 with exact numerics and f16 with fast if left out.
    #[arg(long, value_parser = ["f32", "f16", "bf16", "i8"])]
    pub kv_dtype: Option<String>,
}

impl ModelArgs {
    pub fn path(&self) -> PathBuf {
        self.model.clone().unwrap_or_else(story_model)
    }

    pub fn device(&self) -> Result<Arc<dyn Device>> {
        match self.device.as_str() {
            "cpu" => {
                let mut options = CpuOptions::default();
                (options.threads, options.isa) = (self.threads, self.isa()?);
                Ok(Arc::new(CpuDevice::new(options)?))
            }
            #[cfg(feature = "ascend")]
            name => {
                let mut options = ascend_llm::device::ascend::AscendOptions::default();
                options.cards = (0..self.ranks).collect();
                if name == "ascend-sim" {
                    let sim = match std::env::var_os("ASCEND_SIM_LIBRARY") {
                        Some(path) => ascend_sim::Simulator::open(Path::new(&path))?,
                        None => ascend_sim::Simulator::beside_this_binary()?,
                    };
                    if self.ranks > 1 {
                        sim.reset();
                        sim.set("devices", self.ranks.into());
                    }
                    options.library = Some(sim.path().to_owned());
                    options.dcmi_library.clone_from(&options.library);
                }
                Ok(ascend_llm::device::ascend::AscendDevice::open(options)?)
            }
            #[cfg(not(feature = "ascend"))]
            name => Err(format!("device {name} needs a build with --features ascend").into()),
        }
    }

    /// The instruction sets asked for.
    pub fn isa(&self) -> Result<Option<Isa>> {
        let Some(name) = &self.isa else { return Ok(None) };
        let found = Isa::available().iter().copied().find(|isa| isa.name() == name);
        if found.is_none() {
            let names: Vec<_> = Isa::available().iter().map(|isa| isa.name()).collect();
            return Err(format!("--isa {name}: this machine has {}", names.join(", ")).into());
        }
        Ok(found)
    }

    /// Reads the model's description and makes its graph; no weight is read.
    pub fn graph(&self) -> Result<(ModelConfig, Graph)> {
        let files = model::open(self.path())?;
        let config = match &files.kind {
            ModelKind::Gguf(file) => config_from_gguf(file)?,
            ModelKind::Folder(folder) => config_from_hub(&std::fs::read(folder.join("config.json"))?)?,
            _ => return Err("a model of a form that this example does not know".into()),
        };
        let graph = decoder_graph(&config, files.source.as_ref())?;
        Ok((config, graph))
    }

    /// Whether the device is the host's processor.
    pub fn is_cpu(&self) -> bool {
        self.device == "cpu"
    }

    /// The arithmetic asked for.
    pub fn numerics(&self) -> Numerics {
        if self.numerics.as_deref() == Some("exact") { Numerics::Exact } else { Numerics::Fast }
    }

    /// The type of keys and values asked for.
    pub fn kv_dtype(&self) -> Option<KvDType> {
        self.kv_dtype.as_deref().map(|name| match name {
            "f32" => KvDType::F32,
            "f16" => KvDType::F16,
            "bf16" => KvDType::BF16,
            _ => KvDType::I8,
        })
    }

    /// Bytes of an element of keys and values.
    pub fn kv_element_bytes(&self) -> u64 {
        let of_numerics = if self.numerics() == Numerics::Exact { KvDType::F32 } else { KvDType::F16 };
        self.kv_dtype().unwrap_or(of_numerics).bytes() as u64
    }

    /// Loads the model, with a bar if it takes long enough to be seen.
    pub fn load(&self, config: EngineConfig) -> Result<Engine> {
        let (builder, bar) = self.builder(config, self.device()?);
        let engine = builder.build()?;
        bar.finish_and_clear();
        Ok(engine)
    }

    /// Loads the model onto a device, for an engine that the caller steps.
    pub fn load_core(&self, config: EngineConfig, device: Arc<dyn Device>) -> Result<EngineCore> {
        let (builder, bar) = self.builder(config, device);
        let core = builder.build_core()?;
        bar.finish_and_clear();
        Ok(core)
    }

    /// Loads the model onto a device, for a caller that runs batches itself.
    pub fn load_runner(&self, config: EngineConfig, device: Arc<dyn Device>) -> Result<ModelRunner> {
        let (builder, bar) = self.builder(config, device);
        let runner = builder.build_runner()?;
        bar.finish_and_clear();
        Ok(runner)
    }

    fn builder(&self, mut config: EngineConfig, device: Arc<dyn Device>) -> (EngineBuilder, ProgressBar) {
        match self.numerics.as_deref() {
            Some("exact") => config.numerics = Numerics::Exact,
            Some(_) => config.numerics = Numerics::Fast,
            None => {}
        }
        config.kv_dtype = self.kv_dtype().or(config.kv_dtype);
        config.tensor_parallel_size = self.ranks;
        let bar = ProgressBar::hidden();
        let shown = bar.clone();
        let progress = move |p: LoadProgress| {
            if shown.is_hidden() && p.total_bytes > 64 << 20 && p.done_bytes < p.total_bytes {
                shown.set_length(p.total_bytes);
                shown.set_style(
                    ProgressStyle::with_template("loading {bar:40} {bytes}/{total_bytes} {eta}")
                        .unwrap_or_else(|_| ProgressStyle::default_bar()),
                );
                shown.set_draw_target(indicatif::ProgressDrawTarget::stderr());
            }
            shown.set_position(p.done_bytes);
        };
        (Engine::builder(self.path()).config(config).device(device).on_progress(progress), bar)
    }
}

/// Most memory this process had at once, in bytes, where the system tells.
pub fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Counts [`peak_memory_bytes`] anew from what is in use now. Where the system has no such thing, or refuses, the peak stays
/// that of the whole process.
pub fn reset_peak_memory() {
    // See proc(5): 5 resets the peak resident set size.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The whole chain of causes in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

/// Runs an example; an error is one line on stderr and exit code 1.
pub fn finish(result: Result<()>) -> std::process::ExitCode {
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        // Whoever reads our output has seen enough (`| head`).
        Err(error)
            if error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe) =>
        {
            std::process::ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {}", chain(error.as_ref()));
            std::process::ExitCode::FAILURE
        }
    }
}

//! Shared parts of the command lines: options for opening a model, peak memory, and how errors are printed.
#![allow(dead_code)] // Each program uses its own part.

pub mod op_table;

use std::error::Error;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ascend_llm::device::Device;
use ascend_llm::device::cpu::{CpuDevice, CpuOptions, Isa};
use ascend_llm::engine::{Engine, EngineBuilder, EngineConfig, EngineCore, LoadProgress};
use ascend_llm::graph::{Graph, Numerics};
use ascend_llm::kv_cache::KvDType;
use ascend_llm::model::{self, ModelConfig, config_from_gguf, config_from_hub, decoder_graph};
use ascend_llm::runner::ModelRunner;
use ascend_llm::weights::ModelKind;

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Path of the story model that comes with the crate.
pub fn story_model() -> PathBuf {
    let file = "examples/models/fable-f16.gguf";
    // The package of a tool is in a folder below the crate.
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|folder| folder.join(file));
    folders.find(|path| path.exists()).unwrap_or_else(|| file.into())
}

/// Options that choose a model, a device and its arithmetic.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelArgs {
    /// Model: a folder with safetensors files, or a GGUF file. Default: the story model of this crate.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Number of threads. Default: the number of processors that this process may use.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Instruction set of the CPU device. Default: the fastest one of this machine.
    #[arg(long, value_parser = ["plain", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "neon", "neon_dot"])]
    pub isa: Option<String>,
    /// Device. ascend-sim runs the Ascend device on the simulated runtime: the library named by `ASCEND_SIM_LIBRARY`, or the
    /// one that cargo built with this program.
    #[arg(long, default_value = "cpu", value_parser = ["cpu", "ascend", "ascend-sim"])]
    pub device: String,
    /// Number of tensor-parallel ranks. On an Ascend device each rank runs on a card of its own; on a CPU the ranks run in turn.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks: u32,
    /// Arithmetic: exact (f32 throughout), or fast (int8 activations for integer weights, 16-bit keys and values).
    #[arg(long, value_parser = ["exact", "fast"])]
    pub numerics: Option<String>,
    /// Type of stored keys and values. Default: f32 with exact numerics, f16 with fast.
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

    /// The requested instruction set.
    ///
    /// # Errors
    /// A name that this machine does not support.
    pub fn isa(&self) -> Result<Option<Isa>> {
        let Some(name) = &self.isa else { return Ok(None) };
        let found = Isa::available().iter().copied().find(|isa| isa.name() == name);
        if found.is_none() {
            let names: Vec<_> = Isa::available().iter().map(|isa| isa.name()).collect();
            return Err(format!("--isa {name}: this machine has {}", names.join(", ")).into());
        }
        Ok(found)
    }

    /// Reads the description of the model and builds its graph. No weight is read.
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

    /// Whether the device is the CPU.
    pub fn is_cpu(&self) -> bool {
        self.device == "cpu"
    }

    /// The requested arithmetic; fast if none is given.
    pub fn numerics(&self) -> Numerics {
        if self.numerics.as_deref() == Some("exact") { Numerics::Exact } else { Numerics::Fast }
    }

    /// The requested type of keys and values.
    pub fn kv_dtype(&self) -> Option<KvDType> {
        self.kv_dtype.as_deref().map(|name| match name {
            "f32" => KvDType::F32,
            "f16" => KvDType::F16,
            "bf16" => KvDType::BF16,
            _ => KvDType::I8,
        })
    }

    /// Size of an element of keys and values.
    pub fn kv_element_bytes(&self) -> u64 {
        let of_numerics = if self.numerics() == Numerics::Exact { KvDType::F32 } else { KvDType::F16 };
        self.kv_dtype().unwrap_or(of_numerics).bytes() as u64
    }

    /// Loads the model. Progress is shown if it takes more than a moment.
    pub fn load(&self, config: EngineConfig) -> Result<Engine> {
        Ok(self.builder(config, self.device()?).build()?)
    }

    /// Loads the model onto a device, for an engine that the caller steps.
    pub fn load_core(&self, config: EngineConfig, device: Arc<dyn Device>) -> Result<EngineCore> {
        Ok(self.builder(config, device).build_core()?)
    }

    /// Loads the model onto a device, for a caller that runs batches itself.
    pub fn load_runner(&self, config: EngineConfig, device: Arc<dyn Device>) -> Result<ModelRunner> {
        Ok(self.builder(config, device).build_runner()?)
    }

    fn builder(&self, mut config: EngineConfig, device: Arc<dyn Device>) -> EngineBuilder {
        match self.numerics.as_deref() {
            Some("exact") => config.numerics = Numerics::Exact,
            Some(_) => config.numerics = Numerics::Fast,
            None => {}
        }
        config.kv_dtype = self.kv_dtype().or(config.kv_dtype);
        config.tensor_parallel_size = self.ranks;
        let terminal = std::io::stderr().is_terminal();
        let shown_percent = AtomicU64::new(u64::MAX);
        let progress = move |p: LoadProgress| {
            let percent = p.done_bytes * 100 / p.total_bytes.max(1);
            if terminal && p.total_bytes > 64 << 20 && shown_percent.swap(percent, Ordering::Relaxed) != percent {
                let gb = |bytes: u64| bytes as f64 / 1e9;
                let end = if p.done_bytes == p.total_bytes { "\r\x1b[K" } else { "" };
                eprint!("\rloading {percent:>3} % of {:.2} GB{end}", gb(p.total_bytes));
            }
        };
        Engine::builder(self.path()).config(config).device(device).on_progress(progress)
    }
}

/// Largest resident memory of this process so far, in bytes. `None` where the system does not report it.
pub fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Restarts [`peak_memory_bytes`] from the memory in use now. Where the system does not allow that, the peak stays that of
/// the whole process.
pub fn reset_peak_memory() {
    // See proc(5): 5 resets the peak resident set size.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// An error with its causes in one line. A cause whose message the error before it repeats already is left out.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let message = inner.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = inner.source();
    }
    text
}

/// Exit code of a program: an error is one line on stderr and exit code 1.
pub fn finish(result: Result<()>) -> std::process::ExitCode {
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        // The reader of the output has closed it, as `| head` does.
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

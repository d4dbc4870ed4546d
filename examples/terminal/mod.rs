//! Shared parts of the command-line programs: model options, loading with a progress bar, peak memory, error output.
#![allow(dead_code)] // each program uses a part

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use ascend_llm::device::Device;
use ascend_llm::device::cpu::{CpuDevice, CpuOptions, Isa};
use ascend_llm::engine::{Engine, EngineBuilder, EngineConfig, LoadProgress};
use ascend_llm::graph::Numerics;
use ascend_llm::kv_cache::KvDType;
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Result of a program that reports any error to the user.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Smallest model that loads with a progress bar, in bytes.
const BAR_FROM_BYTES: u64 = 64 << 20;

/// Path of the bundled story model.
///
/// The package is the repository's root or a folder in it.
pub fn story_model() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths = package.ancestors().map(|folder| folder.join("examples/models/fable-f16.gguf"));
    paths.find(|path| path.exists()).unwrap_or_else(|| package.join("fable-f16.gguf"))
}

/// Device to run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// Ascend NPUs.
    Ascend,
    /// Simulated Ascend NPUs: the library named by `ASCEND_SIM_LIBRARY`, or the one that cargo built.
    AscendSim,
}

/// Options of every program that loads a model.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelArgs {
    /// Model: a GGUF file, or a folder with `config.json` and safetensors [default: the bundled story model].
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Number of CPU threads [default: all that this process may use].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Instruction set of the CPU device [default: the fastest one of this machine].
    #[arg(long, value_parser = isa())]
    pub isa: Option<Isa>,
    /// Device to run on.
    #[arg(long, value_enum, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// Number of tensor-parallel ranks. Each takes one card of an Ascend device; a CPU runs them in turn.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks: u32,
    /// Numerics: `exact` computes in f32 throughout, `fast` uses int8 activations for integer weights and a 16-bit KV
    /// cache.
    #[arg(long, value_parser = named::<Numerics>(["exact", "fast"]))]
    pub numerics: Option<Numerics>,
    /// Element type of the KV cache [default: f32 with `exact`, f16 with `fast`].
    #[arg(long, value_parser = named::<KvDType>(["f32", "f16", "bf16", "i8"]))]
    pub kv_dtype: Option<KvDType>,
}

/// Parses the names that serde reads for `T`.
fn named<T>(names: impl IntoIterator<Item = &'static str>) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| serde_json::from_value::<T>(name.into()))
}

/// Parses the name of an instruction set of this machine.
fn isa() -> impl TypedValueParser<Value = Isa> {
    let find = |name: String| Isa::available().iter().copied().find(|isa| isa.name() == name).ok_or("not available");
    PossibleValuesParser::new(Isa::available().iter().map(|isa| isa.name())).try_map(find)
}

impl ModelArgs {
    /// Path of the model.
    pub fn path(&self) -> PathBuf {
        self.model.clone().unwrap_or_else(story_model)
    }

    /// Opens the device.
    ///
    /// # Errors
    /// The device's error, or a sentence that names the missing feature.
    pub fn device(&self) -> Result<Arc<dyn Device>> {
        if self.is_cpu() {
            let mut options = CpuOptions::default();
            (options.threads, options.isa) = (self.threads, self.isa);
            return Ok(Arc::new(CpuDevice::new(options)?));
        }
        self.ascend()
    }

    #[cfg(feature = "ascend")]
    fn ascend(&self) -> Result<Arc<dyn Device>> {
        let mut options = ascend_llm::device::ascend::AscendOptions::default();
        options.cards = (0..self.ranks).collect();
        if self.device == DeviceKind::AscendSim {
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
    fn ascend(&self) -> Result<Arc<dyn Device>> {
        let name = self.device.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned());
        Err(format!("--device {name} needs a build with --features ascend").into())
    }

    /// Whether the device is the CPU.
    pub fn is_cpu(&self) -> bool {
        self.device == DeviceKind::Cpu
    }

    /// Numerics for answers that people read: `exact` on a CPU, unless an option asks for something else.
    ///
    /// int8 activations move logits by some tenths, which changes the answer where the two most likely tokens are closer
    /// than that. `exact` requires an f32 KV cache, so another type selects `fast`, with a note on stderr.
    pub fn numerics_for_reading(&self) -> Numerics {
        match (self.numerics, self.kv_dtype) {
            (Some(numerics), _) => numerics,
            (None, None | Some(KvDType::F32)) if self.is_cpu() => Numerics::Exact,
            (None, Some(dtype)) if self.is_cpu() => {
                eprintln!("note: numerics are fast, because exact does not support a KV cache in {}", label(&dtype));
                Numerics::Fast
            }
            (None, _) => Numerics::Fast,
        }
    }

    /// Builder of an engine with these options; options that were not given keep the value in `config`.
    pub fn quiet_builder(&self, mut config: EngineConfig, device: Arc<dyn Device>) -> EngineBuilder {
        config.threads = self.threads.or(config.threads);
        config.numerics = self.numerics.unwrap_or(config.numerics);
        config.kv_dtype = self.kv_dtype.or(config.kv_dtype);
        config.tensor_parallel_size = self.ranks;
        Engine::builder(self.path()).config(config).device(device)
    }

    /// The same builder with a progress bar on stderr while a large model loads.
    pub fn builder(&self, config: EngineConfig, device: Arc<dyn Device>) -> EngineBuilder {
        let bar = ProgressBar::hidden();
        if let Ok(style) = ProgressStyle::with_template("loading {bar:40} {bytes}/{total_bytes}, {eta} left") {
            bar.set_style(style);
        }
        let progress = move |progress: LoadProgress| {
            if progress.total_bytes < BAR_FROM_BYTES || bar.is_finished() {
                return;
            }
            if bar.position() == 0 {
                bar.set_length(progress.total_bytes);
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            bar.set_position(progress.done_bytes);
            if progress.done_bytes >= progress.total_bytes {
                bar.finish_and_clear();
            }
        };
        self.quiet_builder(config, device).on_progress(progress)
    }
}

/// The name that serde gives a value, such as `exact` or `f16`; empty for `None`.
pub fn label(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

/// Peak resident memory of this process in bytes, on systems with `/proc`.
pub fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Resets [`peak_memory_bytes`] to the memory in use, if the system allows it.
pub fn reset_peak_memory() {
    // See proc(5): 5 resets the peak resident set size.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The error and its causes in one line.
///
/// Many errors quote their cause, so a cause that the line already contains is left out.
pub fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    for cause in std::iter::successors(error.source(), |&cause| cause.source()) {
        let cause = cause.to_string();
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

/// Exit code of a program: prints an error as one line on stderr and returns 1.
///
/// A closed pipe (`| head`) is no error.
pub fn finish(result: Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let io = error.downcast_ref::<std::io::Error>();
    if io.is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {}", chain(error.as_ref()));
    ExitCode::FAILURE
}

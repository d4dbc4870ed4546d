//! Measures the usual scenarios: prefill of 512 tokens, decode after 32 and after 1,024 tokens, batches, load time, memory.
//!
//! ```sh
//! cargo run --release -p ascend-llm-tools --bin bench -- --model MODEL.gguf --threads 2 --json
//! ```
//! The output is a table of medians over the repetitions with their range. With `--json` each single figure is one line with
//! the fields `peer, model, dtype, scen, metric, value, round, ts`. Scenarios:
//!
//! - `ppN`: prefill of N tokens.
//! - `tg@P`: decode of one sequence after P tokens of context.
//! - `bgBxP+G`: decode of B sequences together; `bgppBxP`: their prefill.
//! - `first_token_warm`: from opening the file to the first token after a prompt of 32.
//! - `rss_*`: largest resident memory of a scenario.
//!
//! `--what sweep` decodes 1, 2, 4, … 64 sequences. `--svg` draws the sweep, with earlier sweeps given by `--with` (JSON lines).
//!
//! The engine runs without a thread of its own, and each scenario builds an engine. Prefill lasts from submission until
//! each sequence has its first token; all prompts are in one step if they have at most 8,192 tokens together. The decode rate
//! is the number of tokens after that, divided by their time. The program reads each token as soon as it arrives.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ascend_llm::engine::{CacheBudget, EngineConfig, EngineCore, Request, RequestHandle};
use ascend_llm::sampler::SamplingParams;
use clap::Parser;
use serde_json::json;

#[path = "../terminal/mod.rs"]
mod terminal;
mod throughput_chart;

use terminal::{ModelArgs, Result, peak_memory_bytes, reset_peak_memory};
use throughput_chart::Line;

/// Largest number of rows of a step. Larger steps are no faster and need more memory.
const MAX_STEP_TOKENS: u32 = 8192;
/// Smallest row capacity of an engine.
const MIN_STEP_TOKENS: u32 = 512;

/// Measures prefill, decode, batches, load time and memory.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Scenarios to measure: load, pp, tg, bg, sweep.
    #[arg(long, value_delimiter = ',', default_value = "load,pp,tg,bg")]
    what: Vec<String>,
    /// Batches as BxP+G: sequences x prompt tokens + generated tokens.
    #[arg(long, value_delimiter = ',', default_value = "8x128+64,32x128+64,64x64+32,8x256+128")]
    batches: Vec<String>,
    /// Number of tokens that a single sequence generates.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    generate: u32,
    /// File for a picture of the sweep, as SVG.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Earlier sweeps, as files of JSON lines, for the same picture.
    #[arg(long, value_delimiter = ',')]
    with: Vec<PathBuf>,
    /// Number of measured runs of each scenario.
    #[arg(long, default_value_t = 3)]
    reps: u32,
    /// Prints JSON lines, one for each run, instead of a table of medians.
    #[arg(long)]
    json: bool,
    /// Number of the round, copied into each JSON line.
    #[arg(long, default_value_t = 0)]
    round: u32,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    for what in &args.what {
        if !["load", "pp", "tg", "bg", "sweep"].contains(&what.as_str()) {
            return Err(format!("--what {what}: expected load, pp, tg, bg or sweep").into());
        }
    }
    let batches = args.batches.iter().map(|text| parse_batch(text)).collect::<Result<Vec<_>>>()?;
    let wants = |what: &str| args.what.iter().any(|w| w == what);
    let mut bench = Bench { args, max_model_len: None, machine: String::new() };

    if wants("load") {
        bench.load()?;
    }
    if wants("pp") {
        bench.measure("pp512", Load { seqs: 1, prompt: 512, decode: 0 }, |report, run| {
            report.emit("pp512", "tok/s", run.prefill_rate());
        })?;
    }
    if wants("tg") {
        for prompt in [32, 1024] {
            let name = format!("tg@{prompt}");
            bench.measure(&name, Load { seqs: 1, prompt, decode: args.generate }, |report, run| {
                report.emit(&name, "tok/s", run.decode_rate());
            })?;
        }
    }
    if wants("bg") {
        for load in batches {
            let Load { seqs, prompt, decode } = load;
            let name = format!("bg{seqs}x{prompt}+{decode}");
            bench.measure(&name, load, |report, run| {
                report.emit(&name, "tok/s", run.decode_rate());
                report.emit(&format!("bgpp{seqs}x{prompt}"), "tok/s", run.prefill_rate());
            })?;
        }
    }
    if wants("sweep") {
        let line = bench.sweep()?;
        if let Some(path) = &args.svg {
            let mut lines = args.with.iter().map(|path| read_sweep(path)).collect::<Result<Vec<_>>>()?;
            lines.push(line);
            let title = format!("Decode throughput of {} by batch size", bench.model());
            throughput_chart::draw(path, &title, &bench.machine, &lines)
                .map_err(|error| format!("{}: {error}", path.display()))?;
        }
    }
    Ok(())
}

/// Prompt and generated tokens of each sequence of a sweep.
const SWEEP: (u32, u32) = (64, 32);

/// The medians of an earlier sweep's figures.
fn read_sweep(path: &Path) -> Result<Line> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut line = Line { name: String::new(), points: Vec::new() };
    let mut rates: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for figure in text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()) {
        let scenario = figure["scen"].as_str().unwrap_or_default();
        let load = scenario.strip_prefix("bg").and_then(|load| parse_batch(load).ok());
        if let (Some(load), Some(rate)) = (load, figure["value"].as_f64()) {
            rates.entry(load.seqs).or_default().push(rate);
            figure["dtype"].as_str().unwrap_or_default().clone_into(&mut line.name);
        }
    }
    line.points = rates.into_iter().map(|(seqs, rates)| (seqs, median(rates))).collect();
    Ok(line)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Sequences and tokens of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Load {
    /// Number of sequences.
    seqs: u32,
    /// Tokens of each prompt.
    prompt: u32,
    /// Tokens of each sequence after its first.
    decode: u32,
}

impl Load {
    /// Tokens a sequence reaches.
    fn len(self) -> u64 {
        u64::from(self.prompt) + 1 + u64::from(self.decode)
    }

    fn config(self, args: &Args, block_size: usize) -> Result<EngineConfig> {
        let mut config = EngineConfig::default();
        config.threads = args.model.threads;
        // A cache hit would measure something else.
        config.prefix_caching = false;
        config.max_num_seqs = self.seqs;
        config.max_queue = self.seqs;
        let prompts = u64::from(self.seqs) * u64::from(self.prompt);
        let rows = prompts.clamp(MIN_STEP_TOKENS.into(), MAX_STEP_TOKENS.into());
        config.max_num_batched_tokens = u32::try_from(rows)?.max(self.seqs);
        // Blocks for each sequence at its longest. The scheduler keeps a watermark of 1 % of the pool, hence 2 % and a
        // block in addition.
        let blocks = u64::from(self.seqs) * self.len().div_ceil(block_size as u64);
        config.block_size = Some(u32::try_from(block_size)?);
        config.kv_cache = CacheBudget::Blocks(u32::try_from(blocks + blocks / 50 + 1)?);
        Ok(config)
    }
}

fn parse_batch(text: &str) -> Result<Load> {
    let parse = || {
        let (seqs, rest) = text.split_once('x')?;
        let (prompt, decode) = rest.split_once('+')?;
        let load = Load { seqs: seqs.parse().ok()?, prompt: prompt.parse().ok()?, decode: decode.parse().ok()? };
        (load.seqs >= 1 && load.prompt >= 1 && load.decode >= 1).then_some(load)
    };
    parse().ok_or_else(|| format!("--batches {text}: expected BxP+G, each at least 1, as in 8x128+64").into())
}

struct Bench<'a> {
    args: &'a Args,
    /// The model's longest sequence, once one engine has been made.
    max_model_len: Option<u32>,
    /// Description of the machine, once one engine has been built.
    machine: String,
}

impl Bench<'_> {
    fn model(&self) -> String {
        self.args
            .model
            .path()
            .file_stem()
            .map_or_else(|| "model".to_owned(), |stem| stem.to_string_lossy().into_owned())
    }

    /// Prints the header of the table, once.
    fn describe(&mut self, core: &EngineCore) {
        if !self.machine.is_empty() {
            return;
        }
        let info = core.info();
        self.machine.clone_from(&info.device_description);
        if !self.args.json {
            let name = |found: Option<String>| found.unwrap_or_else(|| "unknown".to_owned());
            println!(
                "model     {} ({}, {:.1} M parameters)\nmachine   {}\nnumerics  {}, keys and values {}\n\
                 engine    ascend-llm {} {}\nruns      {} of each scenario; median (lowest to highest)\n",
                self.model(),
                name(info.weight_dtype.map(|dtype| dtype.name().to_owned())),
                info.parameters as f64 / 1e6,
                info.device_description,
                name(info.numerics.map(|numerics| format!("{numerics:?}").to_lowercase())),
                name(info.kv_dtype.map(|dtype| format!("{dtype:?}").to_lowercase())),
                info.version,
                info.commit.unwrap_or_default(),
                self.args.reps
            );
        }
    }

    /// An engine for a load. `None`, with a note, if the context of the model is too short.
    fn open(&mut self, name: &str, load: Load) -> Result<Option<EngineCore>> {
        if self.max_model_len.is_none_or(|longest| load.len() <= longest.into()) {
            let device = self.args.model.device()?;
            let config = load.config(self.args, device.caps().default_block_size)?;
            let core = self.args.model.load_core(config, device)?;
            self.max_model_len = Some(core.info().max_model_len);
            self.describe(&core);
            if load.len() <= core.info().max_model_len.into() {
                return Ok(Some(core));
            }
        }
        let (len, longest) = (load.len(), self.max_model_len.unwrap_or_default());
        eprintln!("{name} is left out: sequences of {len} tokens, the model takes {longest}");
        Ok(None)
    }

    /// Decode of 1 to 64 sequences.
    fn sweep(&mut self) -> Result<Line> {
        let mut line = Line { name: String::new(), points: Vec::new() };
        for seqs in [1, 2, 4, 8, 16, 32, 64] {
            let load = Load { seqs, prompt: SWEEP.0, decode: SWEEP.1 };
            let mut rates = Vec::new();
            let name = format!("bg{seqs}x{}+{}", SWEEP.0, SWEEP.1);
            self.measure(&name, load, |report, run| {
                line.name.clone_from(&report.dtype);
                report.emit(&name, "tok/s", run.decode_rate());
                rates.push(run.decode_rate());
            })?;
            line.points.push((seqs, median(rates)));
        }
        Ok(line)
    }

    /// Time from opening the file to a first token, and the memory for it.
    fn load(&mut self) -> Result<()> {
        let load = Load { seqs: 1, prompt: 32, decode: 0 };
        let mut report: Option<Report<'_>> = None;
        let args = self.args;
        for rep in 1..=args.reps {
            reset_peak_memory();
            let start = Instant::now();
            let Some(mut core) = self.open("load", load)? else { return Ok(()) };
            run_load(&mut core, load, 1)?;
            let elapsed = start.elapsed();
            let report = report.get_or_insert_with(|| Report::new(args, &core));
            report.progress("load", rep);
            report.emit("first_token_warm", "s", elapsed.as_secs_f64());
            report.emit_peak("load_32tok");
        }
        if let Some(report) = report {
            report.finish();
        }
        Ok(())
    }

    /// Runs a load once without measuring, so that memory is allocated, and then `--reps` times.
    fn measure(&mut self, name: &str, load: Load, mut emit: impl FnMut(&mut Report<'_>, &Run)) -> Result<()> {
        reset_peak_memory();
        let Some(mut core) = self.open(name, load)? else { return Ok(()) };
        let mut report = Report::new(self.args, &core);
        report.progress(name, 0);
        run_load(&mut core, Load { decode: load.decode.min(2), ..load }, 0)?;
        for rep in 1..=self.args.reps {
            report.progress(name, rep);
            emit(&mut report, &run_load(&mut core, load, rep)?);
        }
        report.emit_peak(name);
        report.finish();
        Ok(())
    }
}

/// Times of a load.
#[derive(Clone, Copy, Debug)]
struct Run {
    prompt_tokens: u64,
    /// From submission until each sequence has its first token.
    prefill: Duration,
    decoded_tokens: u64,
    /// From the end of the prefill until the last token.
    decode: Duration,
}

impl Run {
    fn prefill_rate(&self) -> f64 {
        self.prompt_tokens as f64 / self.prefill.as_secs_f64()
    }

    fn decode_rate(&self) -> f64 {
        self.decoded_tokens as f64 / self.decode.as_secs_f64()
    }
}

/// Runs the sequences of a load together until all have ended.
fn run_load(core: &mut EngineCore, load: Load, rep: u32) -> Result<Run> {
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(load.decode + 1);
    params.ignore_eos = true;
    let vocab = core.info().vocab_size;
    let requests: Vec<_> = (0..load.seqs)
        .map(|seq| Request::tokens(prompt(rep * load.seqs + seq, load.prompt, vocab)).with_sampling(params.clone()))
        .collect();

    let start = Instant::now();
    let handles =
        requests.into_iter().map(|request| core.submit(request)).collect::<std::result::Result<Vec<_>, _>>()?;
    let mut readers: Vec<Reader> = handles.into_iter().map(|handle| Reader { handle, tokens: 0 }).collect();
    while readers.iter().any(|reader| reader.tokens == 0) && !core.is_idle() {
        step(core, &mut readers)?;
    }
    let first = Instant::now();
    let in_prefill = total(&readers);
    while !core.is_idle() {
        step(core, &mut readers)?;
    }
    let decode = first.elapsed();

    let expected = u64::from(load.seqs) * u64::from(load.decode + 1);
    let tokens = total(&readers);
    if tokens != expected {
        return Err(format!("{load:?}: {tokens} tokens arrived, expected {expected}").into());
    }
    Ok(Run {
        prompt_tokens: u64::from(load.seqs) * u64::from(load.prompt),
        prefill: first - start,
        decoded_tokens: tokens - in_prefill,
        decode,
    })
}

struct Reader {
    handle: RequestHandle,
    tokens: u64,
}

fn total(readers: &[Reader]) -> u64 {
    readers.iter().map(|reader| reader.tokens).sum()
}

/// Runs one step and reads the new tokens.
fn step(core: &mut EngineCore, readers: &mut [Reader]) -> Result<()> {
    core.step()?;
    for reader in readers {
        while let Some(delta) = reader.handle.try_recv()? {
            reader.tokens += delta.token_ids.len() as u64;
        }
    }
    Ok(())
}

/// `n` token ids that depend on the seed. None is special in a vocabulary of the usual kind.
fn prompt(seed: u32, n: u32, vocab: u32) -> Vec<u32> {
    let low = (vocab / 8).min(1000);
    let mut x = seed.wrapping_mul(7919).wrapping_add(17);
    (0..n)
        .map(|_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            low + (x >> 8) % (vocab - 2 * low)
        })
        .collect()
}

/// Output of one scenario.
struct Report<'a> {
    args: &'a Args,
    model: String,
    dtype: String,
    /// Figures by scenario and metric, in the order in which they appear.
    figures: Vec<(String, String, Vec<f64>)>,
}

impl<'a> Report<'a> {
    fn new(args: &'a Args, core: &EngineCore) -> Self {
        let stem = args.model.path().file_stem().map(|stem| stem.to_string_lossy().into_owned());
        Self {
            args,
            model: stem.unwrap_or_else(|| "model".to_owned()),
            dtype: core.info().weight_dtype.map_or(String::new(), |dtype| dtype.name().to_owned()),
            figures: Vec::new(),
        }
    }

    /// Shows the run at hand on a terminal; run 0 is the warm-up.
    fn progress(&self, scenario: &str, rep: u32) {
        if !self.args.json && std::io::stderr().is_terminal() {
            eprint!("\r\x1b[K{scenario}: run {rep} of {}", self.args.reps);
        }
    }

    fn emit(&mut self, scenario: &str, metric: &str, value: f64) {
        if self.args.json {
            let ts = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
            let line = json!({
                "peer": "ascend-llm", "model": self.model, "dtype": self.dtype, "scen": scenario, "metric": metric,
                "value": (value * 1e4).round() / 1e4, "round": self.args.round, "ts": ts,
            });
            println!("{line}");
            return;
        }
        match self.figures.iter_mut().find(|figure| figure.0 == scenario && figure.1 == metric) {
            Some(figure) => figure.2.push(value),
            None => self.figures.push((scenario.to_owned(), metric.to_owned(), vec![value])),
        }
    }

    /// Prints the medians of the table.
    fn finish(self) {
        if !self.args.json && std::io::stderr().is_terminal() {
            eprint!("\r\x1b[K");
        }
        for (scenario, metric, values) in self.figures {
            let range = values.iter().fold((f64::MAX, f64::MIN), |(low, high), &x| (low.min(x), high.max(x)));
            let spread = if values.len() > 1 { format!(" ({:.2} to {:.2})", range.0, range.1) } else { String::new() };
            println!("{scenario:<20} {:>12.2} {metric:<6}{spread}", median(values));
        }
    }

    fn emit_peak(&mut self, scenario: &str) {
        if let Some(bytes) = peak_memory_bytes() {
            self.emit(&format!("rss_{scenario}"), "MiB", bytes as f64 / f64::from(1 << 20));
        }
    }
}

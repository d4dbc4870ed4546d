//! Benchmark: prefill of 512 tokens, decode after 32 and 1,024 tokens, batches, start-up time, memory.
//!
//! ```sh
//! cargo run --release -p ascend-llm-tools --bin bench -- --model MODEL.gguf --threads 2
//! ```
//! A header describes the run: model, machine, device, numerics, threads and commit. The table has the median of the
//! repetitions and their range. Scenarios:
//!
//! - `ppN`: prefill of N tokens.
//! - `tg@P`: decode of one sequence after P tokens of context.
//! - `bgBxP+G`: decode of B sequences in one batch, each with P prompt tokens and G generated tokens; `bgppBxP` is their
//!   prefill.
//! - `first_token_warm`: time from opening the file, which is in the page cache, to the first token after 32.
//! - `rss_*`: peak resident memory of a scenario.
//!
//! `--what sweep` decodes batches of 1, 2, 4, … 64 sequences. `--svg` draws the sweep, together with earlier sweeps given
//! by `--with` (files with their JSON lines).
//!
//! With `--json` stdout has a JSON line for each measurement of each repetition: `peer, model, dtype, scen, metric, value,
//! round, ts`, and `device, machine, numerics, kv_dtype, threads, version, commit` of the header.
//!
//! The engine runs without a thread of its own, and each scenario builds a new engine. Each scenario runs once unmeasured,
//! start-up excepted. Prefill lasts from submission until each sequence has its first token; the prompts are in one step
//! if they have 8,192 tokens together or less. Decode is the rest: its tokens divided by its time. Each token is read when
//! it arrives.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ascend_llm::engine::{CacheBudget, EngineConfig, EngineCore, Request, RequestHandle};
use ascend_llm::sampler::SamplingParams;
use ascend_llm_tools::terminal::{self, ModelArgs, Result, label, peak_memory_bytes, reset_peak_memory};
use ascend_llm_tools::throughput_chart::{self, Line};
use ascend_llm_tools::{machine, mib, model_name};
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

/// Maximum number of rows of a step; longer prompts are computed in chunks. Larger steps are no faster and take memory.
const MAX_STEP_TOKENS: u32 = 8192;
/// Minimum of `max_num_batched_tokens`.
const MIN_STEP_TOKENS: u32 = 512;
/// Batch sizes of a sweep.
const SWEEP_SEQS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Prompt and generated tokens of each sequence of a sweep.
const SWEEP: (u32, u32) = (64, 32);

/// Measures prefill, decode, batches, start-up time and memory.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Name of the model in the output [default: the file's name].
    #[arg(long)]
    name: Option<String>,
    /// Groups of scenarios to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "load,pp,tg,bg")]
    what: Vec<Group>,
    /// Batches of `bg`, as BxP+G: sequences x prompt tokens + generated tokens.
    #[arg(long, value_delimiter = ',', default_value = "8x128+64,32x128+64,64x64+32,8x256+128", value_parser = parse_batch)]
    batches: Vec<Load>,
    /// Number of tokens that `tg` generates.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    generate: u32,
    /// Draws the sweep as an SVG file.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Earlier sweeps for the drawing, as files of JSON lines.
    #[arg(long, value_delimiter = ',')]
    with: Vec<PathBuf>,
    /// Number of measured runs of each scenario.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,
    /// Prints JSON lines instead of a table.
    #[arg(long)]
    json: bool,
    /// Number of the round, copied into each JSON line.
    #[arg(long, default_value_t = 0)]
    round: u32,
}

/// A group of scenarios.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Group {
    /// Start-up: from opening the file to the first token.
    Load,
    /// Prefill of 512 tokens.
    Pp,
    /// Decode of one sequence.
    Tg,
    /// The batches of `--batches`.
    Bg,
    /// Decode of 1 to 64 sequences.
    Sweep,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let scenarios: Vec<Scenario> = args.what.iter().flat_map(|&group| scenarios(group, args)).collect();
    // Start-up has no unmeasured run.
    let runs: u64 = scenarios.iter().map(|s| u64::from(args.reps) + u64::from(s.group != Group::Load)).sum();
    let bar =
        ProgressBar::new(runs).with_style(ProgressStyle::with_template("{bar:30} {pos}/{len} runs, {elapsed}, {msg}")?);
    let mut bench = Bench { args, bar, header: None, max_model_len: None };
    let mut sweep = Line { name: String::new(), points: Vec::new() };
    for scenario in &scenarios {
        bench.bar.set_message(scenario.name.clone());
        let Some(figures) = bench.measure(scenario)? else { continue };
        bench.report(&figures)?;
        if scenario.group == Group::Sweep {
            sweep.points.push((scenario.load.seqs, median(&figures[0].values)));
        }
    }
    bench.bar.finish_and_clear();
    if let (Some(path), Some(header)) = (&args.svg, &bench.header) {
        sweep.name.clone_from(&header.dtype);
        let mut lines = args.with.iter().map(|path| read_sweep(path)).collect::<Result<Vec<_>>>()?;
        lines.push(sweep);
        let title = format!("{}: decode throughput by batch size", header.model);
        throughput_chart::draw(path, &title, &header.subtitle(), &lines)?;
    }
    Ok(())
}

/// A load to measure.
#[derive(Clone, Debug)]
struct Scenario {
    group: Group,
    name: String,
    load: Load,
}

fn scenarios(group: Group, args: &Args) -> Vec<Scenario> {
    let scenario = |name: String, seqs, prompt, decode| Scenario { group, name, load: Load { seqs, prompt, decode } };
    let batch = |Load { seqs, prompt, decode }| scenario(format!("bg{seqs}x{prompt}+{decode}"), seqs, prompt, decode);
    match group {
        Group::Load => vec![scenario("load_32tok".to_owned(), 1, 32, 0)],
        Group::Pp => vec![scenario("pp512".to_owned(), 1, 512, 0)],
        Group::Tg => [32, 1024].map(|prompt| scenario(format!("tg@{prompt}"), 1, prompt, args.generate)).into(),
        Group::Bg => args.batches.iter().copied().map(batch).collect(),
        Group::Sweep => SWEEP_SEQS.map(|seqs| batch(Load { seqs, prompt: SWEEP.0, decode: SWEEP.1 })).into(),
    }
}

/// Measurements of one quantity, one for each repetition.
#[derive(Clone, Debug)]
struct Figures {
    name: String,
    unit: &'static str,
    values: Vec<f64>,
}

/// Reads the medians of an earlier sweep.
fn read_sweep(path: &Path) -> Result<Line> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let mut name = String::new();
    let mut rates: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for figure in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let scenario = figure["scen"].as_str().unwrap_or_default();
        let load = scenario.strip_prefix("bg").and_then(|load| parse_batch(load).ok());
        if let (Some(load), Some(rate)) = (load, figure["value"].as_f64()) {
            rates.entry(load.seqs).or_default().push(rate);
            figure["dtype"].as_str().unwrap_or_default().clone_into(&mut name);
        }
    }
    let points: Vec<_> = rates.into_iter().map(|(seqs, rates)| (seqs, median(&rates))).collect();
    if points.is_empty() {
        return Err(format!("{}: expected JSON lines of a sweep", path.display()).into());
    }
    Ok(Line { name, points })
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 if middle > 0 => f64::midpoint(values[middle - 1], values[middle]),
        _ => values.get(middle).copied().unwrap_or_default(),
    }
}

/// A value of the table with at least three digits.
fn number(value: f64) -> String {
    format!("{value:.*}", if value < 10.0 { 4 } else { 1 })
}

/// Work that a scenario submits to an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Load {
    /// Number of sequences.
    seqs: u32,
    /// Tokens of each prompt.
    prompt: u32,
    /// Tokens that each sequence generates after its first one.
    decode: u32,
}

impl Load {
    /// Final length of a sequence.
    fn len(self) -> u64 {
        u64::from(self.prompt) + 1 + u64::from(self.decode)
    }

    fn config(self, block_size: usize) -> Result<EngineConfig> {
        // Each prompt is new, so the prefix cache could only cost time.
        let mut config = EngineConfig::default().with_prefix_caching(false).with_max_num_seqs(self.seqs);
        config.max_queue = self.seqs;
        let prompts = u64::from(self.seqs) * u64::from(self.prompt);
        let rows = prompts.clamp(MIN_STEP_TOKENS.into(), MAX_STEP_TOKENS.into());
        config.max_num_batched_tokens = u32::try_from(rows)?.max(self.seqs);
        // Blocks for each sequence at its final length. The scheduler keeps 1 % of the pool free when it admits a
        // sequence; 2 % and a block cover that.
        let blocks = u64::from(self.seqs) * self.len().div_ceil(block_size as u64);
        config.block_size = Some(u32::try_from(block_size)?);
        config.kv_cache = CacheBudget::Blocks(u32::try_from(blocks + blocks / 50 + 1)?);
        Ok(config)
    }
}

fn parse_batch(text: &str) -> std::result::Result<Load, String> {
    let parse = || {
        let (seqs, rest) = text.split_once('x')?;
        let (prompt, decode) = rest.split_once('+')?;
        let load = Load { seqs: seqs.parse().ok()?, prompt: prompt.parse().ok()?, decode: decode.parse().ok()? };
        (load.seqs >= 1 && load.prompt >= 1 && load.decode >= 1).then_some(load)
    };
    parse().ok_or_else(|| "expected BxP+G, each at least 1, as in 8x128+64".to_owned())
}

/// Description of a run.
#[derive(Clone, Debug)]
struct Header {
    model: String,
    dtype: String,
    parameters: u64,
    machine: String,
    device: String,
    numerics: String,
    kv_dtype: String,
    threads: usize,
    version: &'static str,
    commit: &'static str,
}

impl Header {
    fn new(args: &Args, core: &EngineCore) -> Self {
        let (info, config) = (core.info(), core.config());
        let all = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            model: args.name.clone().unwrap_or_else(|| model_name(&args.model.path())),
            dtype: info.weight_dtype.map_or_else(String::new, |dtype| dtype.name().to_owned()),
            parameters: info.parameters,
            machine: machine(),
            device: info.device_description.clone(),
            numerics: label(&info.numerics),
            kv_dtype: label(&info.kv_dtype),
            threads: config.threads.unwrap_or_else(all),
            version: info.version,
            commit: info.commit.unwrap_or("unknown"),
        }
    }

    fn text(&self, reps: u32) -> String {
        format!(
            "model     {} ({:.1} M parameters, {})\n\
             machine   {}\n\
             device    {}\n\
             numerics  {}, KV cache in {}\n\
             threads   {}\n\
             engine    ascend-llm {}, commit {}\n\
             runs      {reps} of each scenario\n",
            self.model,
            self.parameters as f64 / 1e6,
            self.dtype,
            self.machine,
            self.device,
            self.numerics,
            self.kv_dtype,
            self.threads,
            self.version,
            self.commit,
        )
    }

    /// Second line of a chart.
    fn subtitle(&self) -> String {
        let (threads, (prompt, decode)) = (self.threads, SWEEP);
        let plural = if threads == 1 { "" } else { "s" };
        format!(
            "{}; {threads} thread{plural}, {} numerics; {prompt} + {decode} tokens a sequence; commit {}",
            self.machine, self.numerics, self.commit
        )
    }
}

struct Bench<'a> {
    args: &'a Args,
    bar: ProgressBar,
    /// Set when the first engine is built.
    header: Option<Header>,
    /// The model's context, once an engine was built.
    max_model_len: Option<u32>,
}

impl Bench<'_> {
    /// Builds an engine for a scenario. Returns `None`, with a note, if the model's context is too short.
    fn open(&mut self, Scenario { name, load, .. }: &Scenario) -> Result<Option<EngineCore>> {
        if self.max_model_len.is_none_or(|longest| load.len() <= longest.into()) {
            let device = self.args.model.device()?;
            let config = load.config(device.caps().default_block_size)?;
            let core = self.args.model.quiet_builder(config, device).build_core()?;
            self.max_model_len = Some(core.info().max_model_len);
            if load.len() <= core.info().max_model_len.into() {
                return Ok(Some(core));
            }
        }
        let (len, longest) = (load.len(), self.max_model_len.unwrap_or_default());
        let note =
            format!("note: {name} is skipped: it has sequences of {len} tokens, the model's context is {longest}");
        self.bar.suspend(|| eprintln!("{note}"));
        Ok(None)
    }

    /// Measures a scenario.
    fn measure(&mut self, scenario: &Scenario) -> Result<Option<Vec<Figures>>> {
        if scenario.group == Group::Load {
            return self.measure_start(scenario);
        }
        reset_peak_memory();
        let Some(mut core) = self.open(scenario)? else { return Ok(None) };
        self.set_header(&core)?;
        // The first run brings the memory in.
        run_load(&mut core, Load { decode: scenario.load.decode.min(2), ..scenario.load }, 0)?;
        self.bar.inc(1);
        let mut runs = Vec::new();
        for rep in 1..=self.args.reps {
            runs.push(run_load(&mut core, scenario.load, rep)?);
            self.bar.inc(1);
        }
        let figures = |name: &str, rate: fn(&Run) -> f64| Figures {
            name: name.to_owned(),
            unit: "tok/s",
            values: runs.iter().map(rate).collect(),
        };
        let Load { seqs, prompt, .. } = scenario.load;
        let mut all = match scenario.group {
            Group::Pp => vec![figures(&scenario.name, Run::prefill_rate)],
            Group::Bg => vec![
                figures(&scenario.name, Run::decode_rate),
                figures(&format!("bgpp{seqs}x{prompt}"), Run::prefill_rate),
            ],
            Group::Tg | Group::Sweep | Group::Load => vec![figures(&scenario.name, Run::decode_rate)],
        };
        all.extend(peak_memory(&scenario.name, peak_memory_bytes()));
        Ok(Some(all))
    }

    /// Measures the time from opening the file to a first token, and the peak memory.
    fn measure_start(&mut self, scenario: &Scenario) -> Result<Option<Vec<Figures>>> {
        let (mut seconds, mut peaks) = (Vec::new(), Vec::new());
        for _ in 0..self.args.reps {
            reset_peak_memory();
            let start = Instant::now();
            let Some(mut core) = self.open(scenario)? else { return Ok(None) };
            run_load(&mut core, scenario.load, 1)?;
            seconds.push(start.elapsed().as_secs_f64());
            peaks.extend(peak_memory_bytes());
            self.set_header(&core)?;
            self.bar.inc(1);
        }
        let mut all = vec![Figures { name: "first_token_warm".to_owned(), unit: "s", values: seconds }];
        all.extend(peak_memory(&scenario.name, peaks));
        Ok(Some(all))
    }

    /// Prints the header before the first line, on stderr with `--json`.
    fn set_header(&mut self, core: &EngineCore) -> Result<()> {
        if self.header.is_some() {
            return Ok(());
        }
        let header = Header::new(self.args, core);
        let text = header.text(self.args.reps);
        self.bar.suspend(|| {
            if self.args.json {
                return write!(std::io::stderr(), "{text}");
            }
            let mut out = std::io::stdout();
            writeln!(out, "{text}\n{:<20} {:>12} {:>12} {:>12}  unit", "scenario", "median", "least", "most")
        })?;
        self.header = Some(header);
        Ok(())
    }

    fn report(&self, figures: &[Figures]) -> Result<()> {
        let mut lines = Vec::new();
        for Figures { name, unit, values } in figures {
            if self.args.json {
                lines.extend(values.iter().map(|value| self.json_line(name, unit, *value).to_string()));
            } else {
                let least = values.iter().copied().fold(f64::INFINITY, f64::min);
                let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let [median, least, most] = [median(values), least, most].map(number);
                lines.push(format!("{name:<20} {median:>12} {least:>12} {most:>12}  {unit}"));
            }
        }
        self.bar.suspend(|| {
            let mut out = std::io::stdout().lock();
            lines.iter().try_for_each(|line| writeln!(out, "{line}"))
        })?;
        Ok(())
    }

    fn json_line(&self, scenario: &str, metric: &str, value: f64) -> Value {
        let ts = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
        let header = self.header.as_ref();
        json!({
            "peer": "ascend-llm",
            "model": header.map(|header| &header.model),
            "dtype": header.map(|header| &header.dtype),
            "scen": scenario,
            "metric": metric,
            "value": (value * 1e4).round() / 1e4,
            "round": self.args.round,
            "ts": ts,
            "device": header.map(|header| &header.device),
            "machine": header.map(|header| &header.machine),
            "numerics": header.map(|header| &header.numerics),
            "kv_dtype": header.map(|header| &header.kv_dtype),
            "threads": header.map(|header| header.threads),
            "version": header.map(|header| header.version),
            "commit": header.map(|header| header.commit),
        })
    }
}

/// Peak memory of a scenario, on systems that report it.
fn peak_memory(scenario: &str, bytes: impl IntoIterator<Item = u64>) -> Option<Figures> {
    let values: Vec<f64> = bytes.into_iter().map(mib).collect();
    (!values.is_empty()).then(|| Figures { name: format!("rss_{scenario}"), unit: "MiB", values })
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

/// Runs the sequences of a load in one batch until they end.
fn run_load(core: &mut EngineCore, load: Load, rep: u32) -> Result<Run> {
    let mut params = SamplingParams::greedy().with_max_tokens(load.decode + 1);
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
        return Err(format!("{load:?}: generated {tokens} tokens, expected {expected}").into());
    }
    Ok(Run {
        prompt_tokens: u64::from(load.seqs) * u64::from(load.prompt),
        prefill: first - start,
        decoded_tokens: tokens - in_prefill,
        decode,
    })
}

/// A request with the number of tokens received.
struct Reader {
    handle: RequestHandle,
    tokens: u64,
}

fn total(readers: &[Reader]) -> u64 {
    readers.iter().map(|reader| reader.tokens).sum()
}

/// Runs a step and reads its tokens.
fn step(core: &mut EngineCore, readers: &mut [Reader]) -> Result<()> {
    core.step()?;
    for reader in readers {
        while let Some(delta) = reader.handle.try_recv()? {
            reader.tokens += delta.token_ids.len() as u64;
        }
    }
    Ok(())
}

/// `n` token ids that depend on the seed. They avoid both ends of the vocabulary, where special tokens usually are.
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

//! Shows what a model is compiled to: fusion, steps, what a decode and a prefill step cost, and a map of the arena.
//!
//! ```sh
//! cargo run --release --example inspect_plan
//! cargo run --release --example inspect_plan -- --model MODEL.gguf --fusion 0 --tokens 512 --svg arena.svg
//! ```
//! Nothing is loaded: the model's description is read, and the plan is computed from it.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use ascend_llm::graph::passes::{PrecisionPolicy, apply_precision, fuse, legalize, shard};
use ascend_llm::graph::{
    Bucket, CompileOptions, Cost, CostShape, Graph, Numerics, Operand, Plan, Target, TpRank, compile,
};
use ascend_llm::model::{AttentionConfig, LayerConfig, MlpConfig, ModelConfig};
use clap::Parser;

#[path = "../terminal/mod.rs"]
mod terminal;
use terminal::compile_args::CompileArgs;
use terminal::{ModelArgs, Result};

/// Shows what a model is compiled to.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of the prefill step, and most rows the plan is placed for.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Tokens the sequence has at the decode step; the model's longest if left out.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    #[command(flatten)]
    compile: CompileArgs,
    /// Shows the graph as the model gives it and after each pass.
    #[arg(long)]
    passes: bool,
    /// Leaves the list of steps out.
    #[arg(long)]
    no_dump: bool,
    /// Writes a map of the arena there.
    #[arg(long)]
    svg: Option<PathBuf>,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let (config, graph) = args.model.graph()?;
    let longest = u32::try_from(config.max_position_embeddings).unwrap_or(u32::MAX);
    let context = args.context.unwrap_or(longest);
    for (flag, tokens) in [("tokens", args.tokens), ("context", context)] {
        if tokens > longest {
            return Err(format!("--{flag} {tokens}: expected at most the model's {longest} tokens").into());
        }
    }
    let options = args.compile.options()?;
    let numerics = args.model.numerics();
    let target = args.model.device()?.caps().target;
    let graph = if args.passes {
        passes(&graph, target, numerics, &options, args.model.ranks)?
    } else {
        shard(&graph, TpRank { index: 0, of: args.model.ranks })?
    };
    let bucket = Bucket { tokens: args.tokens as usize, logit_rows: 1, seqs: 1, kv_tokens: longest as usize };
    let plan = compile(&graph, target, numerics, &options, bucket)?;
    let kv_element_bytes = args.model.kv_element_bytes();

    print!("{}", summary(&config, &plan, numerics));
    if !args.no_dump {
        print!("\n{}", plan.dump());
    }
    print!("\n{}", table(&plan, &format!("decode, {context} tokens"), &CostShape::decode(context, kv_element_bytes)));
    let prefill = CostShape::prefill(args.tokens, kv_element_bytes);
    print!("\n{}", table(&plan, &format!("prefill of {} tokens", args.tokens), &prefill));
    if let Some(path) = &args.svg {
        std::fs::write(path, arena_map(&plan)).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// Prints the graph before and after each pass in the compiler's order; gives the first rank's, as the compiler takes it.
fn passes(graph: &Graph, target: Target, numerics: Numerics, options: &CompileOptions, ranks: u32) -> Result<Graph> {
    options.validate(numerics)?;
    println!("the model's graph\n{}", graph.dump());
    let graph = shard(graph, TpRank { index: 0, of: ranks })?;
    if ranks > 1 {
        println!("shard\n{}", graph.dump());
    }
    let policy = PrecisionPolicy::new(options, numerics, target);
    let rounded = apply_precision(&graph, &policy)?;
    println!("precision\n{}", rounded.dump());
    let (fused, report) = fuse(&rounded, options.resolved_fusion(), target.ops, options.attention);
    println!("fuse: {report:?}\n{}", fused.dump());
    println!("legalize\n{}", legalize(&fused, target.ops, target.attention_schedules)?.dump());
    Ok(graph)
}

/// Sizes of a layer; layers of one model differ in windows at most.
fn layer_summary(layer: &LayerConfig) -> String {
    match (&layer.attention, layer.mlp) {
        (AttentionConfig::GroupedQuery(a), MlpConfig::Gated(mlp)) => {
            format!("{}/{} heads of {}, MLP of {}", a.heads, a.kv_heads, a.head_dim, mlp.intermediate_size)
        }
        other => format!("{other:?}"),
    }
}

fn summary(config: &ModelConfig, plan: &Plan, numerics: Numerics) -> String {
    let groups = plan.groups().len();
    let all: usize = plan.values.iter().filter(|v| is_in_arena(v.operand)).map(|v| v.bytes(&plan.bucket)).sum();
    format!(
        "model     {} of {:.1} M parameters: {} layers of {}, {}, {} ids, {} tokens\n\
         numerics  {numerics:?}\n\
         fusion    level {}: {:?}\n\
         launches  {} steps in {groups} groups\n\
         arena     {:.2} MiB; at least {:.2} MiB are alive at once, and {:.2} MiB in all\n",
        config.architecture.name(),
        config.parameters() as f64 / 1e6,
        config.layers.len(),
        config.hidden_size,
        config.layers.first().map_or_else(String::new, layer_summary),
        config.vocab_size,
        config.max_position_embeddings,
        plan.fusion,
        plan.fused,
        plan.steps.len(),
        mib(plan.arena_bytes as u64),
        mib(plan.arena_bound_bytes as u64),
        mib(all as u64),
    )
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn table(plan: &Plan, title: &str, shape: &CostShape) -> String {
    let costs = plan.step_costs(shape);
    let mut text = format!(
        "{title}\n{:<16} {:>8} {:>12} {:>12} {:>12} {:>12} {:>10}\n",
        "operation", "launches", "Mflop", "weights MiB", "values MiB", "KV MiB", "flop/byte"
    );
    let mut line = |op: &str, launches: usize, cost: Cost| {
        let (weights, values, kv) = (mib(cost.weight_bytes), mib(cost.activation_bytes), mib(cost.kv_bytes));
        let mflop = cost.flops as f64 / 1e6;
        let _ = writeln!(
            text,
            "{op:<16} {launches:>8} {mflop:>12.3} {weights:>12.3} {values:>12.3} {kv:>12.3} {:>10.2}",
            cost.intensity()
        );
    };
    for op in plan.costs_by_op(&costs) {
        line(op.op, op.launches as usize, op.cost);
    }
    line("total", plan.steps.len(), costs.into_iter().sum());
    text
}

fn is_in_arena(operand: Operand) -> bool {
    matches!(operand, Operand::Arena { .. })
}

/// The arena over time: a column a step, a rectangle a value from its first use to its last.
fn arena_map(plan: &Plan) -> String {
    const STEP: f64 = 14.0;
    const HEIGHT: f64 = 800.0;
    const MARGIN: f64 = 20.0;
    let width = plan.steps.len() as f64 * STEP;
    let scale = HEIGHT / plan.arena_bytes.max(1) as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"10\">\n\
         <title>arena of {} bytes over {} steps</title>\n\
         <rect x=\"{MARGIN}\" y=\"{MARGIN}\" width=\"{width}\" height=\"{HEIGHT}\" fill=\"#f4f4f4\"/>\n",
        width + 2.0 * MARGIN,
        HEIGHT + 2.0 * MARGIN,
        plan.arena_bytes,
        plan.steps.len()
    );
    for (at, step) in plan.steps.iter().enumerate() {
        let _ = writeln!(
            svg,
            "<rect x=\"{}\" y=\"{}\" width=\"{STEP}\" height=\"{MARGIN}\" fill=\"{}\"><title>{at} {}</title></rect>",
            MARGIN + at as f64 * STEP,
            HEIGHT + MARGIN,
            if at % 2 == 0 { "#cccccc" } else { "#dddddd" },
            escaped(&step.op.to_string())
        );
    }
    for (index, value) in plan.values.iter().enumerate() {
        let Operand::Arena { offset } = value.operand else { continue };
        let touches = |at: &usize| {
            let step = &plan.steps[*at];
            step.inputs.iter().chain(&step.outputs).chain(&step.scratch).any(|&touched| touched == index)
        };
        let mut uses = (0..plan.steps.len()).filter(touches);
        let Some(first) = uses.next() else { continue };
        let last = uses.next_back().unwrap_or(first);
        let bytes = value.bytes(&plan.bucket);
        let _ = writeln!(
            svg,
            "<rect x=\"{}\" y=\"{:.2}\" width=\"{}\" height=\"{:.2}\" fill=\"hsl({},60%,65%)\" stroke=\"#333333\" \
             stroke-width=\"0.5\"><title>{} {bytes} bytes at {offset}, steps {first} to {last}</title></rect>",
            MARGIN + first as f64 * STEP,
            MARGIN + offset as f64 * scale,
            (last - first + 1) as f64 * STEP,
            bytes as f64 * scale,
            index * 47 % 360,
            escaped(&value.name)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

//! Shows the compiled plan of a model: fusion, steps, the cost of a decode and a prefill step, and a picture of the arena.
//!
//! ```sh
//! cargo run --release -p ascend-llm-tools --bin inspect_plan
//! cargo run --release -p ascend-llm-tools --bin inspect_plan -- --model MODEL.gguf --fusion 0 --tokens 512 --svg arena.svg
//! ```
//! The tool reads the model's configuration only and loads no weights.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use ascend_llm::graph::passes::{PrecisionPolicy, apply_precision, fuse, legalize, shard};
use ascend_llm::graph::{
    Bucket, CompileOptions, Cost, CostShape, Graph, Numerics, Operand, Plan, Target, TpRank, compile,
};
use ascend_llm::model::{AttentionConfig, LayerConfig, MlpConfig, ModelConfig};
use ascend_llm_tools::compile_args::CompileArgs;
use ascend_llm_tools::terminal::{self, ModelArgs, Result, label};
use ascend_llm_tools::{arena_map, kv_element_bytes, mib, model_name};
use clap::Parser;

/// Shows the compiled plan of a model.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of the prefill step; the arena is planned for this number of rows.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Tokens of the sequence at the decode step [default: the model's context].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    #[command(flatten)]
    compile: CompileArgs,
    /// Prints the model's graph and the graph after each pass.
    #[arg(long)]
    passes: bool,
    /// Omits the list of steps.
    #[arg(long)]
    no_dump: bool,
    /// Draws the arena over the steps as an SVG file.
    #[arg(long)]
    svg: Option<PathBuf>,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let (config, graph) = ascend_llm_tools::graph(&args.model.path())?;
    let longest = u32::try_from(config.max_position_embeddings).unwrap_or(u32::MAX);
    let context = args.context.unwrap_or(longest);
    for (flag, tokens) in [("tokens", args.tokens), ("context", context)] {
        if tokens > longest {
            return Err(format!("--{flag} {tokens}: expected at most the model's {longest} tokens").into());
        }
    }
    let options = args.compile.options()?;
    let numerics = args.model.numerics.unwrap_or_default();
    let target = args.model.device()?.caps().target;
    let mut text = String::new();
    if args.passes {
        text = passes(&graph, target, numerics, &options, args.model.ranks)?;
    }
    let graph = shard(&graph, TpRank { index: 0, of: args.model.ranks })?;
    let bucket = Bucket { tokens: args.tokens as usize, logit_rows: 1, seqs: 1, kv_tokens: longest as usize };
    let plan = compile(&graph, target, numerics, &options, bucket)?;
    let kv_element_bytes = kv_element_bytes(&args.model);

    text.push_str(&summary(&config, &plan, numerics));
    if !args.no_dump {
        write!(text, "\n{}", plan.dump())?;
    }
    let decode = CostShape::decode(context, kv_element_bytes);
    write!(text, "\n{}", table(&plan, &format!("decode step at {context} tokens"), &decode))?;
    let prefill = CostShape::prefill(args.tokens, kv_element_bytes);
    write!(text, "\n{}", table(&plan, &format!("prefill step of {} tokens", args.tokens), &prefill))?;
    std::io::stdout().write_all(text.as_bytes())?;
    if let Some(path) = &args.svg {
        arena_map::draw(path, &model_name(&args.model.path()), &plan)?;
    }
    Ok(())
}

/// The graph before and after each pass, in the compiler's order; of several ranks, the first one's graph.
fn passes(graph: &Graph, target: Target, numerics: Numerics, options: &CompileOptions, ranks: u32) -> Result<String> {
    options.validate(numerics)?;
    let mut text = format!("the model's graph\n{}\n", graph.dump());
    let graph = shard(graph, TpRank { index: 0, of: ranks })?;
    if ranks > 1 {
        writeln!(text, "shard\n{}", graph.dump())?;
    }
    let policy = PrecisionPolicy::new(options, numerics, target);
    let rounded = apply_precision(&graph, &policy)?;
    writeln!(text, "precision\n{}", rounded.dump())?;
    let (fused, report) = fuse(&rounded, options.resolved_fusion(), target.ops, options.attention);
    writeln!(text, "fuse: {report:?}\n{}", fused.dump())?;
    writeln!(text, "legalize\n{}", legalize(&fused, target.ops, target.attention_schedules)?.dump())?;
    Ok(text)
}

/// Sizes of a layer. The layers of a model differ in their attention windows only.
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
        "model     {}, {:.1} M parameters: {} layers of width {}, {}, vocabulary {}, context {}\n\
         numerics  {}\n\
         fusion    level {}: {:?}\n\
         launches  {} steps in {groups} groups\n\
         arena     {:.2} MiB; live values need at most {:.2} MiB at once and {:.2} MiB without reuse\n",
        config.architecture.name(),
        config.parameters() as f64 / 1e6,
        config.layers.len(),
        config.hidden_size,
        config.layers.first().map_or_else(String::new, layer_summary),
        config.vocab_size,
        config.max_position_embeddings,
        label(&numerics),
        plan.fusion,
        plan.fused,
        plan.steps.len(),
        mib(plan.arena_bytes as u64),
        mib(plan.arena_bound_bytes as u64),
        mib(all as u64),
    )
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

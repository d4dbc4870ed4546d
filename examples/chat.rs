//! Interactive chat in the terminal.
//!
//! ```sh
//! cargo run --release --example chat
//! cargo run --release --example chat -- --model MODEL.gguf --system "Answer in one sentence." --temperature 0.7
//! printf 'Hello\nTell me more\n' | cargo run --release --example chat
//! ```
//! The model sees the whole conversation in every turn; the prefix cache holds the keys and values of the earlier turns.
//! `/reset` starts a new conversation, and the end of the input (Ctrl-D) ends the program. A turn that fails is reported
//! and removed from the conversation.

use std::io::{BufRead as _, IsTerminal as _, Write};
use std::process::ExitCode;

use ascend_llm::engine::{Engine, EngineConfig, GenerateError, Request, SubmitError, Usage};
use ascend_llm::sampler::SamplingParams;
use ascend_llm::text::ChatMessage;
use clap::Parser;

mod terminal;
use terminal::{ModelArgs, Result};

/// Chats with a model in the terminal.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// System message of the conversation.
    #[arg(long)]
    system: Option<String>,
    /// Maximum number of tokens of an answer.
    #[arg(long, default_value_t = 512)]
    max_tokens: u32,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Seed of the sampler; the same seed repeats the answers.
    #[arg(long)]
    seed: Option<u64>,
    /// Prints tokens and times after each answer.
    #[arg(long)]
    verbose: bool,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let config = EngineConfig::default().with_max_num_seqs(1).with_numerics(args.model.numerics_for_reading());
    let engine = args.model.builder(config, args.model.device()?).build()?;
    let mut params = SamplingParams::default().with_max_tokens(args.max_tokens);
    (params.temperature, params.seed) = (args.temperature, args.seed);
    let mut chat = Chat { engine, params, system: args.system.clone().map(ChatMessage::system), turns: Vec::new() };

    let stdin = std::io::stdin();
    let is_interactive = stdin.is_terminal();
    if is_interactive {
        eprintln!("/reset starts a new conversation, Ctrl-D ends the program.");
    }
    let (mut lines, mut out) = (stdin.lock().lines(), std::io::stdout().lock());
    loop {
        if is_interactive {
            write!(out, "> ")?;
            out.flush()?;
        }
        let Some(line) = lines.next().transpose()? else { break };
        match line.trim() {
            "" => {}
            "/reset" => chat.turns.clear(),
            question => match chat.answer(question, &mut out) {
                Ok(usage) if args.verbose => eprintln!("[{}]", describe(&usage)),
                Ok(_) => {}
                // Stdout is closed.
                Err(error) if error.is::<std::io::Error>() => return Err(error),
                Err(error) => eprintln!("error: {}", terminal::chain(error.as_ref())),
            },
        }
    }
    if is_interactive {
        writeln!(out)?;
    }
    Ok(())
}

/// A conversation with a model.
struct Chat {
    engine: Engine,
    params: SamplingParams,
    system: Option<ChatMessage>,
    /// Questions with their answers.
    turns: Vec<[ChatMessage; 2]>,
}

impl Chat {
    /// Streams the answer to a question and adds both to the conversation.
    ///
    /// The oldest turns are dropped if the conversation exceeds the model's context.
    fn answer(&mut self, question: &str, out: &mut impl Write) -> Result<Usage> {
        let question = ChatMessage::user(question);
        let handle = loop {
            let turns = self.turns.iter().flatten();
            let messages: Vec<_> = self.system.iter().chain(turns).chain([&question]).cloned().collect();
            match self.engine.submit(Request::chat(messages).with_sampling(self.params.clone())) {
                Err(SubmitError::TooLong { .. }) if !self.turns.is_empty() => {
                    self.turns.remove(0);
                    eprintln!("note: the conversation is too long, its oldest turn is dropped");
                }
                handle => break handle.map_err(GenerateError::from)?,
            }
        };
        let (mut text, mut usage) = (String::new(), Usage::default());
        for delta in handle {
            let delta = match delta {
                Ok(delta) => delta,
                Err(error) => {
                    writeln!(out)?;
                    return Err(error.into());
                }
            };
            out.write_all(delta.text.as_bytes())?;
            out.flush()?;
            text.push_str(&delta.text);
            usage = delta.usage.unwrap_or(usage);
        }
        writeln!(out)?;
        self.turns.push([question, ChatMessage::assistant(text)]);
        Ok(usage)
    }
}

fn describe(usage: &Usage) -> String {
    let rate = f64::from(usage.generated_tokens.saturating_sub(1)) / (usage.decode_us as f64 / 1e6);
    format!(
        "prompt {} tokens, {} of them cached; generated {} tokens, {rate:.0} tokens/s",
        usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens
    )
}

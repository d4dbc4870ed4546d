//! A conversation in the terminal: each line is a turn, `/reset` starts over, the end of the input ends the program.
//!
//! ```sh
//! cargo run --release --example chat -- MODEL.gguf
//! printf 'What does the duck say?\nWho heard it?\n' | cargo run --release --example chat
//! ```

use std::error::Error;
use std::io::{BufRead as _, IsTerminal as _, Write as _};

use ascend_llm::{ChatMessage, Engine, Request, SamplingParams};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/fable-f16.gguf");

fn main() -> Result<(), Box<dyn Error>> {
    let engine = Engine::builder(std::env::args_os().nth(1).unwrap_or_else(|| MODEL.into())).build()?;
    let interactive = std::io::stdin().is_terminal();
    let mut lines = std::io::stdin().lock().lines();
    let mut conversation = Vec::new();
    loop {
        if interactive {
            print!("> ");
            std::io::stdout().flush()?;
        }
        let Some(line) = lines.next().transpose()? else { return Ok(()) };
        match line.trim() {
            "" => continue,
            "/reset" => {
                conversation.clear();
                continue;
            }
            text => conversation.push(ChatMessage::user(text)),
        }
        match answer(&engine, &conversation) {
            Ok(text) => conversation.push(ChatMessage::assistant(text)),
            // A turn that fails, for example because the conversation is too long, is dropped.
            Err(error) => {
                eprintln!("error: {error}");
                conversation.pop();
            }
        }
    }
}

/// Streams the answer to a conversation, and returns it. The prefix cache holds the turns before.
fn answer(engine: &Engine, conversation: &[ChatMessage]) -> Result<String, Box<dyn Error>> {
    let params = SamplingParams::default().with_temperature(0.0).with_max_tokens(512);
    let mut text = String::new();
    for delta in engine.submit(Request::chat(conversation).with_sampling(params))? {
        let delta = delta?;
        print!("{}", delta.text);
        std::io::stdout().flush()?;
        text.push_str(&delta.text);
    }
    println!();
    Ok(text)
}

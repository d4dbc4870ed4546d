//! Tests that a chat template renders byte for byte like Transformers or returns a typed error, and that a hostile one
//! ends.
#![cfg(feature = "text")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ascend_llm::text::{ChatMessage, ChatOptions, ChatTemplate, TextError, Tokenizer};
use serde_json::{Map, Value, json};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn json_file(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(data(name)).unwrap()).unwrap()
}

fn messages_of(list: &Value) -> Vec<ChatMessage> {
    list.as_array().unwrap().iter().map(|message| ChatMessage::from_json(&message.to_string()).unwrap()).collect()
}

/// 29 November 2026, noon: the date of the golden renderings.
const GOLDEN_DAY_UNIX_S: i64 = 1_795_953_600;

/// Renders the golden conversations with the template; returns the number of rows, and the rows that differ.
fn check_golden(name: &str, source: &str) -> (usize, Vec<String>) {
    let conversations = json_file("chat/chat_golden.conversations.json");
    let template = ChatTemplate::new(source, Some("<BOS>"), Some("<EOS>"));
    let (mut seen, mut wrong) = (0, Vec::new());
    for line in std::fs::read_to_string(data("chat/chat_golden.jsonl")).unwrap().lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        if row["template"] != name {
            continue;
        }
        seen += 1;
        let conversation = &conversations[row["conversation"].as_str().unwrap()];
        let mut options = ChatOptions::default()
            .with_generation_prompt(row["add_generation_prompt"] == true)
            .with_now_unix_s(GOLDEN_DAY_UNIX_S);
        if let Some(tools) = conversation.get("tools") {
            options = options.with_tools(tools).unwrap();
        }
        let rendered = match &template {
            Ok(template) => template.render(&messages_of(&conversation["messages"]), &options),
            Err(error) => Err(TextError::Encode { reason: error.to_string() }),
        };
        let expected = row.get("output").and_then(Value::as_str);
        let refusal = row["error"].as_str().and_then(|error| error.strip_prefix("TemplateError: "));
        let right = match (&rendered, expected, refusal) {
            (Ok(text), Some(expected), _) => text == expected,
            (Err(TextError::Refused { reason }), None, Some(refusal)) => reason == refusal,
            (Err(_), None, None) => true,
            _ => false,
        };
        if !right {
            let label = format!("{name} / {} / {}", row["conversation"], row["add_generation_prompt"]);
            let expected = expected.unwrap_or_else(|| row["error"].as_str().unwrap());
            wrong.push(format!("{label}\n  got    {rendered:?}\n  expected {expected:?}"));
        }
    }
    (seen, wrong)
}

#[test]
fn smollm2_renders_every_golden_conversation() {
    let source = std::fs::read_to_string(data("chat/smollm2.jinja")).unwrap();
    let (seen, wrong) = check_golden("smollm2", &source);
    assert_eq!(wrong, Vec::<String>::new());
    assert_eq!(seen, 17);
}

/// Renders the golden conversations with further templates.
///
/// Set `ASCEND_LLM_CHAT_TEMPLATES` to a folder of templates (`NAME.jinja`, also one level down).
#[test]
fn other_templates_render_the_golden_conversations() {
    let Some(folder) = std::env::var_os("ASCEND_LLM_CHAT_TEMPLATES") else { return };
    let mut folders = vec![PathBuf::from(folder)];
    let (mut seen, mut wrong) = (0, Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "jinja") {
                let name = path.file_stem().unwrap().to_str().unwrap();
                let (rows, differing) = check_golden(name, &std::fs::read_to_string(&path).unwrap());
                seen += rows;
                wrong.extend(differing);
            }
        }
    }
    // In Python, two templates fail on tools, but render here: a lazy `map` cannot be serialized as JSON, and text
    // added to a `safe` string is escaped as HTML.
    wrong.retain(|row| {
        let tools = row.contains("\"tools\"") || row.contains("\"tool-roundtrip\"");
        !(tools
            && ["llama-cpp-deepseek-r1 /", "meetkai-functionary-medium-v3.1 /"]
                .iter()
                .any(|name| row.starts_with(name)))
    });
    assert!(wrong.is_empty(), "{} of {seen} differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(seen > 0);
}

#[test]
fn jinja_cases_render_as_the_reference_does() {
    let cases = json_file("cases/chat_templates.json")["cases"].clone();
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 12);
    for case in cases {
        let id = &case["id"];
        let mut variables: Map<String, Value> = case["vars"].as_object().unwrap().clone();
        let messages = messages_of(&variables.remove("messages").unwrap_or(json!([])));
        // 2031-02-03 04:05:06
        let mut options = ChatOptions::default()
            .with_generation_prompt(variables.remove("add_generation_prompt") == Some(json!(true)))
            .with_now_unix_s(1_927_857_906);
        if let Some(tools) = variables.remove("tools") {
            options = options.with_tools(tools).unwrap();
        }
        for (name, value) in variables {
            options = options.with_variable(name, value).unwrap();
        }
        let template = ChatTemplate::new(case["template"].as_str().unwrap(), None, None).unwrap();
        let rendered = template.render(&messages, &options);
        if let Some(expected) = case["expect"]["render"].as_str() {
            assert_eq!(rendered.unwrap(), expected, "{id}");
        } else {
            let error = rendered.unwrap_err().to_string();
            assert!(error.contains(case["expect"]["error_contains"].as_str().unwrap()), "{id}: {error}");
        }
    }
}

#[test]
fn a_template_that_would_run_forever_or_fill_memory_is_stopped() {
    let mut bombs: Vec<String> = json_file("cases/chat_templates.json")["bombs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|bomb| bomb["template"].as_str().unwrap().to_owned())
        .collect();
    bombs.extend(
        [
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "{{ range(1000000000) | list | length }}",
            "{{ range(1000000000) | sum }}",
            "{{ range(1000000000) | tojson }}",
            "{{ range(1000000000) | join('x') }}",
            "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
            "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
            "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
            "{{ '%1000000000d' | format(1) }}",
            "{{ 'x'.center(1000000000) }}",
            "{{ 'x' | indent(1000000000) }}",
            "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
            "{{ ([1] * 1000000000) | tojson }}",
            "{{ 2 ** 1000000000 }}",
        ]
        .map(str::to_owned),
    );
    for bomb in bombs {
        let started = Instant::now();
        let result = ChatTemplate::new(&bomb, None, None)
            .and_then(|template| template.render(&[ChatMessage::user("hi")], &ChatOptions::default()));
        // A second on any machine is the guaranteed bound; the rendering takes milliseconds.
        assert!(started.elapsed() < Duration::from_secs(1), "{bomb}: {:?}", started.elapsed());
        if let Ok(text) = &result {
            assert!(text.len() < 64, "{bomb}: {} bytes", text.len());
        }
    }
    let loops =
        ChatTemplate::new("{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}", None, None)
            .unwrap();
    assert!(matches!(loops.render(&[], &ChatOptions::default()), Err(TextError::Budget { .. })));
}

#[test]
fn a_long_conversation_is_not_taken_for_a_bomb() {
    let source = std::fs::read_to_string(data("chat/smollm2.jinja")).unwrap();
    let template = ChatTemplate::new(&source, None, None).unwrap();
    let messages: Vec<ChatMessage> = (0..20_000).map(|turn| ChatMessage::user(format!("turn {turn}"))).collect();
    let text = template.render(&messages, &ChatOptions::default()).unwrap();
    assert!(text.ends_with("turn 19999<|im_end|>\n<|im_start|>assistant\n"));
    let megabyte = ChatMessage::user("word ".repeat(2_000_000));
    assert!(template.render(&[megabyte], &ChatOptions::default()).unwrap().len() > 10_000_000);
}

#[test]
fn the_story_model_chats_with_one_turn_marker_a_message() {
    let file = |name: &str| std::fs::read(data(name)).unwrap();
    let tokenizer =
        Tokenizer::from_json(&file("fable/tokenizer.json"), Some(&file("fable/tokenizer_config.json"))).unwrap();
    let source = tokenizer.chat_template().unwrap();
    let template = ChatTemplate::new(source, tokenizer.bos_token(), tokenizer.eos_token()).unwrap();
    let messages = [ChatMessage::user("What does the duck say?"), ChatMessage::assistant("The duck says quack!")];
    let text = template.render(&messages, &ChatOptions::default()).unwrap();
    assert_eq!(
        text,
        "<|im_start|>user\nWhat does the duck say?<|im_end|>\n<|im_start|>assistant\nThe duck says quack!<|im_end|>\n\
         <|im_start|>assistant\n"
    );
    let ids = tokenizer.encode_chat(&text).unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == 1).count(), 3);
    assert_eq!(ids.iter().filter(|&&id| id == 2).count(), 2);
    assert_eq!(tokenizer.decode(&ids, false), text);
}

#[test]
fn errors_say_where_and_what() {
    let syntax = ChatTemplate::new("a\nb\n{% for %}", None, None).unwrap_err();
    assert!(matches!(syntax, TextError::Template { line: 3, .. }), "{syntax:?}");
    let template = ChatTemplate::new("{{ raise_exception('only ' ~ messages[0].role) }}", None, None).unwrap();
    let refused = template.render(&[ChatMessage::user("x")], &ChatOptions::default()).unwrap_err();
    assert!(matches!(&refused, TextError::Refused { reason } if reason == "only user"), "{refused:?}");
    for name in ["messages", "tools", "documents", "add_generation_prompt"] {
        let refused = ChatOptions::default().with_variable(name, json!([])).unwrap_err();
        assert!(refused.to_string().contains(name), "{refused}");
    }
    let keys_of_lists = std::collections::BTreeMap::from([(vec![1], 2)]);
    assert!(matches!(ChatOptions::default().with_tools(keys_of_lists), Err(TextError::Json { field: "tools", .. })));
    assert!(matches!(ChatMessage::from_json("{"), Err(TextError::Json { field: "message", .. })));
    for message in [json!("hi"), json!({"content": "x"}), json!({"role": 1})] {
        assert!(ChatMessage::from_json(&message.to_string()).is_err(), "{message}");
        assert!(serde_json::from_value::<ChatMessage>(message).is_err());
    }
}

#[test]
fn a_message_reaches_the_template_as_it_was_given() {
    let given = json!({"role": "tool", "name": "clock", "content": null, "n": [1, 2.5, {"b": 1, "a": "é<"}]});
    let message: ChatMessage = serde_json::from_value(given.clone()).unwrap();
    assert_eq!(message.role(), "tool");
    assert_eq!(serde_json::to_value(&message).unwrap(), given);
    let template = ChatTemplate::new("{{ messages[0] | tojson }}", None, None).unwrap();
    let text = template.render(&[message], &ChatOptions::default()).unwrap();
    assert_eq!(text, r#"{"role": "tool", "name": "clock", "content": null, "n": [1, 2.5, {"b": 1, "a": "é<"}]}"#);
}

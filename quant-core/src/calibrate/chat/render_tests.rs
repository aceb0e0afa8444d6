//! Templates in the styles of real models, malicious ones, and the assistant's text in each.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::*;
use crate::calibrate::Mask;
use crate::calibrate::chat::{ChatTemplate, Conversation, RenderedChat};
use crate::{Error, Result};

/// Turns between two marks, as in ChatML.
const CHATML: &str = "\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}{% endif %}
";
/// A header before each turn, a date and a default system prompt, as in Llama 3.
const HEADERS: &str = "\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'].strip() %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'Today is ' ~ strftime_now('%d %b %Y') ~ '.' %}
{%- endif %}
{{- '<|header|>system<|/header|>\\n\\n' + system + '<|eot|>' }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + message['content'].strip() + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}";
/// Instructions in brackets, with a strict order of turns, as in Mistral.
const BRACKETS: &str = "\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 is even) %}
{{ raise_exception('user and assistant must take turns') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}
{{ ' ' + message['content'].rstrip() + eos_token }}{% endif %}
{% endfor %}";
/// A template with generation blocks, a macro, a namespace and tools.
const GENERATION: &str = "\
{%- macro turn(role) -%}<{{ role }}>{%- endmacro -%}
{%- set ns = namespace(count=0) -%}
{%- if tools %}{{ 'tools: ' + tools | tojson + '\\n' }}{% endif -%}
{%- for message in messages -%}
  {%- set ns.count = ns.count + 1 -%}
  {{ turn(message.role) }}
  {%- if message.role == 'assistant' -%}
    {% generation %}{{ message.content.split('</think>')[-1].lstrip('\\n') }}<end>{% endgeneration %}
  {%- else -%}
    {{ message.content }}<end>
  {%- endif -%}
{%- endfor -%}
{{ '#' ~ ns.count }}";

fn template(source: &str) -> ChatTemplate {
    let tokens = vec![("bos_token", "<s>".to_owned()), ("eos_token", "</s>".to_owned())];
    ChatTemplate::compile(source.to_owned(), tokens, PathBuf::from("chat_template.jinja")).unwrap()
}

fn chat(turns: &[(&str, &str)]) -> Conversation {
    let messages: Vec<Json> = turns.iter().map(|(r, c)| json!({ "role": r, "content": c })).collect();
    Conversation::new(3, json!({ "messages": messages })).unwrap()
}

fn render(source: &str, conversation: &Conversation, mask: Mask) -> Result<RenderedChat> {
    template(source).render(conversation, mask, Path::new("chats.jsonl"))
}

/// The parts of a rendered conversation that the assistant wrote.
fn written(source: &str, conversation: &Conversation) -> (String, Vec<String>) {
    let rendered = render(source, conversation, Mask::Prompts).unwrap();
    assert_eq!(rendered.text, render(source, conversation, Mask::None).unwrap().text);
    let spans = rendered.assistant.iter().map(|s| rendered.text[s.clone()].to_owned()).collect();
    (rendered.text, spans)
}

const TURNS: [(&str, &str); 4] =
    [("user", "Hé?"), ("assistant", "Yes 😀. "), ("user", "Why?"), ("assistant", "So.")];

#[test]
fn answers_are_found_in_every_style() {
    let (text, spans) = written(CHATML, &chat(&TURNS));
    assert_eq!(
        text,
        "<|im_start|>user\nHé?<|im_end|>\n<|im_start|>assistant\nYes 😀.<|im_end|>\n\
         <|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n"
    );
    assert_eq!(spans, ["Yes 😀.<|im_end|>\n", "So.<|im_end|>\n"]);

    let (text, spans) = written(HEADERS, &chat(&TURNS));
    assert!(text.starts_with("<s><|header|>system<|/header|>\n\nToday is 26 Jul 2024.<|eot|>"), "{text}");
    assert_eq!(spans, ["Yes 😀.<|eot|>", "So.<|eot|>"]);
    let system = chat(&[&[("system", " Be kind. ")], &TURNS[..]].concat());
    let (text, spans) = written(HEADERS, &system);
    assert!(text.starts_with("<s><|header|>system<|/header|>\n\nBe kind.<|eot|><|header|>user"), "{text}");
    assert_eq!(spans, ["Yes 😀.<|eot|>", "So.<|eot|>"]);

    let (text, spans) = written(BRACKETS, &chat(&TURNS));
    assert_eq!(text, "<s>[INST] Hé? [/INST] Yes 😀.</s>[INST] Why? [/INST] So.</s>");
    assert_eq!(spans, [" Yes 😀.</s>", " So.</s>"]);

    let thinking = chat(&[("user", "Hé?"), ("assistant", "<think>hm</think>\n\nYes.")]);
    let (text, spans) = written(GENERATION, &thinking);
    assert_eq!(text, "<user>Hé?<end><assistant>Yes.<end>#2");
    assert_eq!(spans, ["Yes.<end>"]);
    // A conversation without answers has no text of the assistant.
    let prompt = chat(&[("user", "only")]);
    assert_eq!(written(BRACKETS, &prompt).1, Vec::<String>::new());
}

#[test]
fn tools_reach_the_template() {
    let with =
        json!({"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "z": 1, "a": 2}]});
    let rendered = render(GENERATION, &Conversation::new(1, with).unwrap(), Mask::None).unwrap();
    assert_eq!(rendered.text, "tools: [{\"name\": \"f\", \"z\": 1, \"a\": 2}]\n<user>x<end>#1");
}

/// Asserts an error that names the file of conversations and its line, the template, the fault and the remedy.
#[track_caller]
fn refused(source: &str, conversation: &Conversation, mask: Mask, expected: &[&str]) {
    let error = render(source, conversation, mask).unwrap_err();
    assert_eq!(error.category(), crate::Category::Input);
    let text = format!("{error}\n{}", error.remedy());
    assert!(text.starts_with("chats.jsonl:3: chat_template.jinja "), "{text}");
    for part in expected {
        assert!(text.contains(part), "no `{part}` in {text}");
    }
}

#[test]
fn refusals_name_their_place() {
    let two = chat(&[("user", "a"), ("user", "b")]);
    refused(BRACKETS, &two, Mask::None, &["line 3", "refuses it: user and assistant must take turns"]);
    refused("\n{{ messages[0].content.nope() }}", &two, Mask::None, &["line 2", "unknown method"]);
    refused("{{ messages[7].content.x }}", &two, Mask::None, &["undefined"]);
    refused("{{ strftime_now('%Q') }}", &two, Mask::None, &["strftime_now does not support"]);
    refused("{% include 'template' %}", &two, Mask::None, &["fails on it"]);
    refused("{% include '/etc/passwd' %}", &two, Mask::None, &["template not found"]);
}

#[test]
fn hostile_templates_end() {
    let one = chat(&[("user", "a")]);
    let steps = ["exceeds the step limit", "as chat_template.jinja, which takes precedence"];
    refused(
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        &one,
        Mask::None,
        &steps,
    );
    refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", &one, Mask::None, &["fails on it"]);
    refused(
        "{% set x = 'x' * 1000000 %}{% for a in range(99) %}{{ x }}{% endfor %}",
        &one,
        Mask::None,
        &["renders it to more than 16777216 bytes", "remove the conversation"],
    );
    refused("{{ 'x' * 99999999999 }}", &one, Mask::None, &["fails on it"]);
    refused("{{ range(99999999999) | list }}", &one, Mask::None, &["fails on it"]);
    for broken in ["{% for", "{% endfor %}", "{{ a b }}", "{% generation %}", &"(".repeat(4000), "\u{fdd0}"] {
        let broken = if broken.starts_with('(') { format!("{{{{ {broken} }}}}") } else { broken.to_owned() };
        let error = ChatTemplate::compile(broken.clone(), vec![], PathBuf::from("t")).unwrap_err();
        assert!(matches!(error, Error::InputFile { .. }), "{broken}: {error}");
    }
}

#[test]
fn indistinguishable_answers_are_refused() {
    let expected = ["does not allow separating prompts from answers", "‹mask=none›", "{% generation %}"];
    // A template that renders only the last turn in full.
    let last = "{% for m in messages %}{{ m.role }}:{% if loop.last %}{{ m.content }}{% endif %};{% endfor %}\
                {% if add_generation_prompt %}assistant:{% endif %}";
    refused(last, &chat(&TURNS), Mask::Prompts, &[&expected[..], &["message 2"]].concat());
    // A template that reverses the order of turns.
    let reversed = "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}";
    refused(reversed, &chat(&TURNS), Mask::Prompts, &[&expected[..], &["depends on"]].concat());
    // A conversation that begins with an answer.
    let first = chat(&[("assistant", "x")]);
    refused("{{ messages[0].content.strip() }}", &first, Mask::Prompts, &expected);
    // Marks in the conversation, nested blocks, and a template that computes with the text of a block.
    let marked = chat(&[("user", "\u{fdd0}"), ("assistant", "x")]);
    refused(GENERATION, &marked, Mask::Prompts, &["noncharacter"]);
    let nested = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}";
    refused(nested, &chat(&TURNS), Mask::Prompts, &["generation blocks are nested"]);
    let measured = "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x | length }}";
    refused(measured, &chat(&TURNS), Mask::Prompts, &["changes when generation blocks are marked"]);
}

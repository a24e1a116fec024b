//! `forebay render` prints the prompt that the chat template makes of messages.

use anyhow::{anyhow, bail};
use forebay_chat::encode_chat;
use forebay_text::{ChatTemplate, ContentMarks, RenderInput, TextError, Tokenizer};
use serde_json::{Map, Value, json};

use crate::args::RenderArgs;
use crate::failure::Outcome;
use crate::open;
use crate::output;
use crate::text_input;

pub fn run(args: RenderArgs) -> Outcome {
    let catalog = open::catalog(&args.model)?;
    let template = ChatTemplate::from_catalog(&catalog)
        .map_err(|error| open::named(error, &args.model))?
        .ok_or_else(|| {
            anyhow!("{}: has no chat template: use its text as it is (--raw)", args.model.display())
        })?;
    let mut input = parse(&text_input::standard()?)?;
    if args.no_generation_prompt {
        input.add_generation_prompt = false;
    }
    let template = template.of_tools().filter(|_| input.tools.is_some()).unwrap_or(&template);
    if !args.json {
        return output::print(&template.render(&input)?);
    }
    let tokenizer = match Tokenizer::from_catalog(&catalog) {
        Err(TextError::NoTokenizerFile) => None,
        tokenizer => Some(tokenizer.map_err(|error| open::named(error, &args.model))?),
    };
    let guarded = tokenizer.as_ref().filter(|_| !args.special_tokens_in_messages);
    let marks = guarded.map(ContentMarks::of).unwrap_or_default();
    let marked = |values: Map<String, Value>| match marks.value(&Value::Object(values)) {
        Value::Object(values) => values,
        _ => Map::new(),
    };
    let prompt = marks.finish(template.render(&RenderInput {
        messages: marks.value(&input.messages),
        tools: input.tools.map(|tools| marks.value(&tools)),
        variables: marked(input.variables),
        ..input
    })?);
    let ids = tokenizer.map(|tokenizer| encode_chat(&tokenizer, &prompt)).transpose()?;
    let document = json!({ "prompt": prompt.text(), "ids": ids, "template": template.origin() });
    output::json(&document)
}

/// Parses a list of messages, or an object with messages and other inputs of the template.
fn parse(text: &str) -> anyhow::Result<RenderInput> {
    let wanted = "write a list of messages, as in [{\"role\": \"user\", \"content\": \"Hello\"}], \
                  or an object with `messages`";
    let value: Value = serde_json::from_str(text)
        .map_err(|error| anyhow!("standard input is not JSON: {error}: {wanted}"))?;
    let mut object = match value {
        Value::Array(messages) => Map::from_iter([("messages".into(), Value::Array(messages))]),
        Value::Object(object) => object,
        _ => bail!("standard input is not a conversation: {wanted}"),
    };
    let messages = match object.remove("messages") {
        Some(messages @ Value::Array(_)) => messages,
        _ => bail!("standard input holds no list `messages`: {wanted}"),
    };
    let tools = object.remove("tools").filter(|tools| !tools.is_null());
    let add_generation_prompt = match object.remove("add_generation_prompt") {
        None | Some(Value::Null) => true,
        Some(Value::Bool(flag)) => flag,
        Some(other) => bail!("`add_generation_prompt` must be true or false, not {other}"),
    };
    let variables = match object.remove("variables") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(variables)) => variables,
        Some(other) => bail!("`variables` must be an object, not {other}"),
    };
    // The other members of the object are variables of the template, as in {"enable_thinking": false}.
    object.extend(variables);
    let variables = object;
    Ok(RenderInput { messages, tools, add_generation_prompt, variables, now: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        let list = parse(r#"[{"role": "user", "content": "x"}]"#).unwrap();
        assert!(list.add_generation_prompt && list.tools.is_none());
        let object = parse(
            r#"{"messages": [], "tools": [{}], "add_generation_prompt": false,
                "enable_thinking": false, "variables": {"depth": 2}}"#,
        )
        .unwrap();
        assert!(!object.add_generation_prompt && object.tools.is_some());
        assert_eq!(object.variables["enable_thinking"], Value::Bool(false));
        assert_eq!(object.variables["depth"], 2);
    }

    #[test]
    fn other_input_is_refused() {
        for text in ["", "1", "{}", r#"{"messages": 1}"#, r#"{"messages": [], "variables": 1}"#] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}

//! Parsing of the bodies of tool calls.

use serde_json::{Map, Value};

use super::{gemma, json_calls, kimi3, minimax3, python};
use crate::ToolSyntax;
use crate::offer::Offer;
use crate::suffixed::{ArgumentMarks, PLAIN};

/// A parsed call. The arguments are JSON.
#[derive(Debug, PartialEq, Eq)]
pub struct Call {
    pub name: String,
    pub arguments: String,
}

impl Call {
    pub fn of(name: &str, arguments: Map<String, Value>) -> Call {
        Call { name: name.to_owned(), arguments: Value::Object(arguments).to_string() }
    }
}

impl ToolSyntax {
    /// Returns the calls in `body`, or `None` if it is not a call.
    pub(crate) fn parse(self, body: &str, offer: &Offer) -> Option<Vec<Call>> {
        let one = |call: Option<Call>| call.map(|call| vec![call]);
        match self {
            ToolSyntax::Json => one(json_calls::object(body)),
            ToolSyntax::FunctionTags => one(function_tags(body, true, offer)),
            ToolSyntax::Seed => one(function_tags(body, false, offer)),
            ToolSyntax::ArgumentTags { .. } => one(argument_tags(body, &PLAIN, offer)),
            ToolSyntax::Suffixed(marks) => one(argument_tags(body, &marks.arguments, offer)),
            ToolSyntax::DeepSeek { .. } => one(deepseek(body)),
            ToolSyntax::Dsml(names) => invokes(body, names.tags(), offer),
            ToolSyntax::MiniMax | ToolSyntax::Dots => invokes(body, ["<", "</"], offer),
            ToolSyntax::Atem => invokes(body, ["<atem:", "</atem:"], offer),
            ToolSyntax::Kimi3 => kimi3::calls(body, offer),
            ToolSyntax::Cohere => json_calls::cohere(body),
            ToolSyntax::Solar => one(json_calls::solar(body)),
            ToolSyntax::MiniMax3 => minimax3::calls(body, offer),
            ToolSyntax::Kimi => one(json_calls::kimi(body)),
            ToolSyntax::FunctionGemma => one(gemma::call(body, "<escape>")),
            ToolSyntax::Gemma4 => one(gemma::call(body, "<|\"|>")),
            ToolSyntax::MistralList { .. } | ToolSyntax::MistralArguments { .. } => {
                json_calls::mistral(body)
            }
            ToolSyntax::Llama => offered(json_calls::objects(body)?, offer),
            ToolSyntax::Python => offered(python::calls(body, offer)?, offer),
            ToolSyntax::Lfm2 => python::calls(body, offer).or_else(|| json_calls::objects(body)),
            ToolSyntax::Olmo3 => python::lines(body, offer),
            ToolSyntax::MarkedList(_) => offered(json_calls::listed(body)?, offer),
            ToolSyntax::Nemotron2 | ToolSyntax::Hunyuan => json_calls::objects(body),
        }
    }
}

/// Returns calls without marks, if all of their tools are offered.
fn offered(calls: Vec<Call>, offer: &Offer) -> Option<Vec<Call>> {
    calls.iter().all(|call| offer.names(&call.name)).then_some(calls)
}

/// Parses `<function=f><parameter=k>v</parameter></function>`. With `in_lines`, a line end before and behind a value
/// is no part of it.
fn function_tags(body: &str, in_lines: bool, offer: &Offer) -> Option<Call> {
    let rest = body.trim().strip_prefix("<function=")?;
    let (name, mut rest) = rest.split_once('>')?;
    let name = name.trim();
    let mut arguments = Map::new();
    while let Some((_, found)) = rest.split_once("<parameter=") {
        let (key, behind) = found.split_once('>')?;
        let (value, behind) = behind.split_once("</parameter>")?;
        let inner = value.strip_prefix('\n').unwrap_or(value);
        let inner = inner.strip_suffix('\n').unwrap_or(inner);
        let value = if in_lines { inner } else { value };
        let key = key.trim();
        arguments.insert(key.to_owned(), typed(value, offer.is_text(name, key)));
        rest = behind;
    }
    Some(Call::of(name, arguments))
}

/// Parses `f<arg_key>k</arg_key><arg_value>v</arg_value>`.
fn argument_tags(body: &str, marks: &ArgumentMarks, offer: &Offer) -> Option<Call> {
    let ([key_open, key_close], [value_open, value_close]) = (marks.key, marks.value);
    let (name, mut rest) = body.split_at(body.find(key_open).unwrap_or(body.len()));
    let name = marks.name(name)?;
    let mut arguments = Map::new();
    while let Some((_, found)) = rest.split_once(key_open) {
        let (key, behind) = found.split_once(key_close)?;
        let (_, behind) = behind.split_once(value_open)?;
        let (value, behind) = behind.split_once(value_close)?;
        let key = key.trim();
        arguments.insert(key.to_owned(), typed(value, offer.is_text(name, key)));
        rest = behind;
    }
    Some(Call::of(name, arguments))
}

/// Parses calls of the form `<invoke name="f"><parameter name="k">v</parameter></invoke>`. `tags` are what tags
/// begin with. The attribute `string="true"` says that a value is a text.
fn invokes(body: &str, tags: [&str; 2], offer: &Offer) -> Option<Vec<Call>> {
    let [open, close] = tags;
    let [invoke, parameter] = ["invoke", "parameter"].map(|tag| format!("{open}{tag} name=\""));
    let [invoke_end, parameter_end] = ["invoke", "parameter"].map(|tag| format!("{close}{tag}>"));
    let mut calls = Vec::new();
    let mut rest = body.trim();
    while !rest.is_empty() {
        let (name, mut inside) = rest.strip_prefix(&*invoke)?.split_once("\">")?;
        let mut arguments = Map::new();
        rest = loop {
            let text = inside.trim_start();
            if let Some(behind) = text.strip_prefix(&*invoke_end) {
                break behind.trim_start();
            }
            let (head, behind) = text.strip_prefix(&*parameter)?.split_once('>')?;
            let (key, attributes) = head.split_once('"')?;
            let (value, behind) = behind.split_once(&*parameter_end)?;
            let declared = match attributes.trim() {
                "string=\"true\"" => Some(true),
                "string=\"false\"" => Some(false),
                _ => offer.is_text(name, key),
            };
            arguments.insert(key.to_owned(), typed(value, declared));
            inside = behind;
        };
        calls.push(Call::of(name, arguments));
    }
    (!calls.is_empty()).then_some(calls)
}

/// Parses the calls of DeepSeek. V3.1 writes `f<｜tool▁sep｜>{...}`. V3 and R1 write
/// `function<｜tool▁sep｜>f`, then a code block of JSON.
fn deepseek(body: &str) -> Option<Call> {
    let (head, rest) = body.split_once("<｜tool▁sep｜>")?;
    // A code block within the arguments is a text.
    let is_object = rest.trim_start().starts_with('{');
    let (name, arguments) = match rest.split_once("```json").filter(|_| !is_object) {
        Some((name, block)) => (name.trim(), block.trim().trim_end_matches("```").trim()),
        None => (head.trim(), rest.trim()),
    };
    let call = || Call { name: name.to_owned(), arguments: arguments.to_owned() };
    (!name.is_empty()).then(call)
}

/// Converts a value between tags. `is_text` is its type by the tool's schema. Without one, valid JSON becomes JSON, and
/// everything else becomes text.
pub fn typed(value: &str, is_text: Option<bool>) -> Value {
    if is_text == Some(true) {
        return Value::String(value.to_owned());
    }
    match serde_json::from_str(value.trim()) {
        Ok(Value::String(_)) | Err(_) => Value::String(value.to_owned()),
        Ok(other) => other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(syntax: ToolSyntax, body: &str) -> Vec<(String, String)> {
        let calls = syntax.parse(body, &Offer::Unknown);
        let calls = calls.unwrap_or_else(|| panic!("not a call: {body}"));
        calls.into_iter().map(|call| (call.name, call.arguments)).collect()
    }

    fn call(name: &str, arguments: &str) -> Vec<(String, String)> {
        vec![(name.to_owned(), arguments.to_owned())]
    }

    const TAGS: ToolSyntax = ToolSyntax::ArgumentTags { compact: false };
    const DEEPSEEK: ToolSyntax = ToolSyntax::DeepSeek { fenced: false };
    const DSML: ToolSyntax = ToolSyntax::Dsml(crate::DsmlNames::V32);

    #[test]
    fn every_syntax() {
        let body = "\n{\"name\": \"f\", \"arguments\": {\"x\":  1}}\n";
        assert_eq!(parse(ToolSyntax::Json, body), call("f", "{\"x\":  1}"));
        let body = "{\"name\": \"f\", \"parameters\": \"{\\\"x\\\": 1}\"}";
        assert_eq!(parse(ToolSyntax::Json, body), call("f", "{\"x\": 1}"));
        assert_eq!(parse(ToolSyntax::Json, "{\"name\": \"f\"}"), call("f", "{}"));

        let body = "\n<function=f>\n<parameter=text>\na\nb\n</parameter>\n<parameter=n>\n5\n\
                    </parameter>\n</function>\n";
        let arguments = "{\"text\":\"a\\nb\",\"n\":5}";
        assert_eq!(parse(ToolSyntax::FunctionTags, body), call("f", arguments));

        let body = "f\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n\
                    <arg_value>[1, 2]</arg_value>\n";
        let arguments = "{\"city\":\"Bern\",\"days\":[1,2]}";
        assert_eq!(parse(TAGS, body), call("f", arguments));

        let body = "f<｜tool▁sep｜>{\"x\": 1}";
        assert_eq!(parse(DEEPSEEK, body), call("f", "{\"x\": 1}"));
        let body = "function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```";
        assert_eq!(parse(DEEPSEEK, body), call("f", "{\"x\": 1}"));

        let body = "\n<invoke name=\"f\">\n<parameter name=\"a\">1 < 2</parameter>\n<parameter name=\"b\">[2]\
                    </parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n";
        let calls = [call("f", "{\"a\":\"1 < 2\",\"b\":[2]}"), call("g", "{}")].concat();
        assert_eq!(parse(ToolSyntax::MiniMax, body), calls);

        let body = "\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">5</｜DSML｜parameter>\n\
                    <｜DSML｜parameter name=\"b\" string=\"false\">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n";
        assert_eq!(parse(DSML, body), call("f", "{\"a\":\"5\",\"b\":5}"));
    }

    #[test]
    fn other_text_is_no_call() {
        let none = |syntax: ToolSyntax, body| syntax.parse(body, &Offer::Unknown).is_none();
        assert!(none(ToolSyntax::Json, "{\"name\": \"f\", \"arguments\": {"));
        assert!(none(ToolSyntax::Json, "like this"));
        assert!(none(ToolSyntax::FunctionTags, "<function=f><parameter=x>1"));
        assert!(none(TAGS, "two words"));
        assert!(none(DEEPSEEK, "f"));
        assert!(none(ToolSyntax::MiniMax, "<invoke name=\"f\">text</invoke>"));
        assert!(none(ToolSyntax::MiniMax, ""));
        // A call without marks needs a tool that is offered.
        assert!(none(ToolSyntax::Llama, "{\"name\": \"f\", \"parameters\": {}}"));
        assert!(none(ToolSyntax::Python, "[f()]"));
    }

    #[test]
    fn the_schema_decides_what_is_text() {
        let properties = json!({ "zip": { "type": "string" }, "days": { "type": "integer" } });
        let parameters = json!({ "type": "object", "properties": properties });
        let tools =
            json!([{ "type": "function", "function": { "name": "f", "parameters": parameters } }]);
        let offer = Offer::of(Some(&tools));
        let body = "f<arg_key>zip</arg_key><arg_value>3000</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>";
        let calls = TAGS.parse(body, &offer).unwrap();
        assert_eq!(calls[0].arguments, "{\"zip\":\"3000\",\"days\":3}");
        let calls = ToolSyntax::Python.parse("[f(zip=\"3000\", days=\"3\")]", &offer).unwrap();
        assert_eq!(calls[0].arguments, "{\"zip\":\"3000\",\"days\":3}");
    }
}

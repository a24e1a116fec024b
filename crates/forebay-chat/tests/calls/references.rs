//! Required calls of tools whose schemas have references.

use forebay_chat::{AnswerStream, CallsWanted, Format};
use forebay_grammar::{Compiler, GrammarError, Rules};
use forebay_text::ChatTemplate;
use serde_json::{Map, Value, json};

use super::{Marks, PYTHON, feed, tokenizer};

/// A short schema that refers to itself does not become a grammar of gigabytes.
#[test]
fn required_calls_with_many_references_are_refused_soon() {
    let tokenizer = tokenizer(Marks::Control);
    let long = json!({ "const": "x".repeat(100_000) });
    let number = json!({ "type": "integer", "anyOf": [{ "$ref": "#/$defs/long" }] });
    let nested = (0..7).fold(number.clone(), |items, _| json!({ "type": "array", "items": items }));
    for member in [json!({ "$ref": "#" }), number, nested] {
        let members = (0..40).map(|number| (format!("p{number}"), member.clone()));
        let properties: Map<String, Value> = members.collect();
        let defs = json!({ "long": long });
        let parameters = json!({ "type": "object", "properties": properties, "$defs": defs });
        let function = json!({ "name": "f", "parameters": parameters });
        let tools = json!([{ "type": "function", "function": function }]);
        for template in [
            "]<]minimax[>[<tool_call>",
            "<start_function_call>",
            "<channel|><|tool_call>call:",
            "<tool_call><function=",
            PYTHON,
        ] {
            let wanted = CallsWanted { tools: &tools, name: None, several: true };
            let template = ChatTemplate::from_source(template, "", "").unwrap();
            let format = Format::recognise(Some(&template), None).unwrap();
            let rules = format.call_rules(&wanted, None, &tokenizer).unwrap();
            let Rules::Lark(text) = &rules else { panic!("{rules:?}") };
            assert!(text.len() < 8 << 20, "{}", text.len());
            let compiled = Compiler::new(&tokenizer).compile(&rules, None);
            assert!(matches!(compiled, Err(GrammarError::Invalid(_))), "{}", text.len());
        }
    }
}

/// Values are texts without quotation marks also where the schema refers to a text.
#[test]
fn required_texts_by_reference_are_those_that_the_parser_reads() {
    let properties =
        json!({ "zip": { "$ref": "#/$defs/zip" }, "unit": { "$ref": "#/$defs/unit" } });
    let defs = json!({ "zip": { "type": "string" }, "unit": { "enum": ["C", "F"] } });
    let parameters = json!({ "type": "object", "properties": properties, "required": ["zip", "unit"], "$defs": defs });
    let tools =
        json!([{ "type": "function", "function": { "name": "f", "parameters": parameters } }]);
    let tokenizer = tokenizer(Marks::Control);
    let mark = "]<]minimax[>[";
    for (template, answer) in [
        (
            "<tool_call><function=",
            "<tool_call>\n<function=f>\n<parameter=zip>\n3000\n</parameter>\n<parameter=unit>\nC\n</parameter>\n\
             </function>\n</tool_call>\n",
        ),
        (
            "</think><tool_call></arg_key><arg_value><arg_key>",
            "<tool_call>f<arg_key>zip</arg_key><arg_value>3000</arg_value><arg_key>unit</arg_key>\
             <arg_value>C</arg_value></tool_call>",
        ),
        (
            "｜DSML｜tool_calls invoke name=",
            "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\
             <｜DSML｜parameter name=\"zip\" string=\"true\">3000</｜DSML｜parameter>\n\
             <｜DSML｜parameter name=\"unit\" string=\"true\">C</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        ),
        (
            "]<]minimax[>[<tool_call>",
            "@<tool_call>\n@<invoke name=\"f\">@<zip>3000@</zip>@<unit>C@</unit>@</invoke>\n@</tool_call>",
        ),
    ] {
        let template = ChatTemplate::from_source(template, "", "").unwrap();
        let format = Format::recognise(Some(&template), None).unwrap().offering(Some(&tools));
        let wanted = CallsWanted { tools: &tools, name: None, several: true };
        let rules = format.call_rules(&wanted, None, &tokenizer).unwrap();
        let grammar = Compiler::new(&tokenizer).compile(&rules, None).unwrap();
        let answer = answer.replace('@', mark);
        assert_eq!(feed(&grammar, &tokenizer, &answer), (answer.len(), true), "{answer}");
        let mut stream = AnswerStream::new(tokenizer.clone(), &format, "", false, &[]);
        for id in tokenizer.encode(&answer, false, true).unwrap() {
            stream.push(id, &mut |_| {});
        }
        let message = stream.finish(&mut |_| {}).0;
        assert_eq!(message.tool_calls[0].arguments, r#"{"zip":"3000","unit":"C"}"#, "{answer}");
    }
}

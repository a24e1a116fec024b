//! Tests of answers of the latest families.

use super::{COHERE, Expected, KIMI3, Piece, SEED, SOLAR, check, format, parse};

/// Marks around answers of Command A+, Kimi K3 and Solar Open.
#[test]
fn marks_of_every_answer() {
    fn want<'a>(reasoning: Option<&'a str>, content: &'a str) -> Expected<'a> {
        Expected { reasoning, content, calls: &[] }
    }
    let call = |calls| Expected { reasoning: Some("Hm."), content: "Yes.", calls };
    let x = [("f", "{\"x\": 1}")];
    let cohere = "<|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"x\": 1}}]<|END_ACTION|>";
    check(
        COHERE,
        "<|START_THINKING|>",
        &format!("Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>{cohere}"),
        &call(&x),
    );
    check(
        COHERE,
        "<|START_THINKING|><|END_THINKING|>",
        "<|START_TEXT|>Yes.<|END_TEXT|>",
        &want(None, "Yes."),
    );
    check(COHERE, "<|START_THINKING|>", "<|END_THINKING|>Yes.", &want(None, "Yes."));
    check(
        COHERE,
        "",
        "The mark <|START_TEXT|> begins it.",
        &want(None, "The mark <|START_TEXT|> begins it."),
    );
    // Not a call: no name, another key for it, and text behind the list.
    for other in
        ["[{\"parameters\": {}}]", "[{\"name\": \"f\"}]", "[{\"tool_name\": \"f\"}] x", "[]", "f"]
    {
        let text = format!("<|START_ACTION|>{other}<|END_ACTION|>");
        check(COHERE, "<|START_THINKING|><|END_THINKING|>", &text, &want(None, &text));
    }

    let kimi = "<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"x\" type=\"number\"<|sep|>1\
                <|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>";
    let [open, close] = ["<|open|>response<|sep|>", "<|close|>response<|sep|>"];
    let end = "<|close|>message<|sep|><|end_of_msg|>";
    let compact = [("f", "{\"x\":1}")];
    let think = "<|open|>think<|sep|>";
    let thought = "Hm.<|close|>think<|sep|>";
    check(KIMI3, think, &format!("{thought}{open}Yes.{close}{kimi}{end}"), &call(&compact));
    check(
        KIMI3,
        think,
        &format!("{thought}{open}{close}{kimi}{end}"),
        &Expected { content: "", ..call(&compact) },
    );
    check(KIMI3, think, &format!("{thought}{kimi}"), &Expected { content: "", ..call(&compact) });
    check(
        KIMI3,
        open,
        &format!("Use the response tag, then message.{close}{end}"),
        &want(None, "Use the response tag, then message."),
    );
    check(KIMI3, open, "Yes.<|close|>resp", &want(None, "Yes.<|close|>resp"));
    check(KIMI3, open, "a <|open|>think<|sep|> b", &want(None, "a <|open|>think<|sep|> b"));
    let broken = kimi.replace("key=", "kay=");
    check(KIMI3, open, &format!("Yes.{close}{broken}{end}"), &want(None, &format!("Yes.{broken}")));
    // Also without tools.
    let message =
        parse(&format(KIMI3).offering(None), open, &[Piece::Text(format!("Yes.{close}{end}"))]);
    assert_eq!(message.content, "Yes.");

    let solar = "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{\"x\": 1}<|tool_call:end|><|calls|>";
    let begin = "<|begin|>assistant";
    let answer = format!("<|think|>Hm.<|end|>{begin}<|content|>Yes.<|end|>{begin}{solar}");
    check(SOLAR, begin, &answer, &call(&x));
    check(SOLAR, begin, "<|content|>Yes.<|end|>", &want(None, "Yes."));
    check(
        SOLAR,
        &format!("<|think|><|end|>{begin}"),
        "<|content|>Yes <|begin|>x.<|end|>",
        &want(None, "Yes <|begin|>x."),
    );
    for other in ["f", "a<|tool_call:name|>f", "a<|tool_call:name|>two words<|tool_call:args|>{}"] {
        let text = format!("<|tool_call:begin|>{other}<|tool_call:end|>");
        check(SOLAR, begin, &format!("<|content|>{text}"), &want(None, &text));
    }
}

/// Values of Seed-OSS have no line ends around them that belong to the form.
#[test]
fn line_ends_in_values() {
    let call = |value: &str| {
        format!(
            "<seed:tool_call>\n<function=f>\n<parameter=x>{value}</parameter>\n</function>\n</seed:tool_call>"
        )
    };
    let want = |calls| Expected { reasoning: None, content: "", calls };
    check(SEED, "", &call("\na\n"), &want(&[("f", "{\"x\":\"\\na\\n\"}")]));
    check(SEED, "", &call("[1]"), &want(&[("f", "{\"x\":[1]}")]));
}

//! Ids of tool calls as a chat template wants them.

use crate::Message;

/// Form of the ids of tool calls in a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ids {
    /// Any id.
    #[default]
    Own,
    /// Nine letters and digits, as Mistral's models write them. Other ids make the templates fail.
    Nine,
    /// Ten small letters and digits, as Solar Open writes them.
    Ten,
    /// `functions.NAME:NUMBER`, as Kimi K2 writes them. The number counts the calls of the conversation.
    Numbered,
}

/// A call that has no result yet.
struct Open {
    /// Id that the client knows.
    id: Option<String>,
    /// Id in the prompt.
    written: Option<String>,
    name: String,
}

/// Gives calls and results ids of the form that the prompt needs, and with `names`, each result the name of its tool.
/// Results without an id belong to the calls of their tool, in the order of the calls.
pub(crate) fn complete(messages: &mut [Message], ids: Ids, names: bool) {
    let mut count = 0;
    let mut open: Vec<Open> = Vec::new();
    for message in messages {
        if !message.tool_calls.is_empty() {
            open.clear();
        }
        for call in &mut message.tool_calls {
            let written = match ids {
                Ids::Own => call.id.clone(),
                Ids::Nine => Some(coded(call.id.as_deref(), count, NINE)),
                Ids::Ten => Some(coded(call.id.as_deref(), count, TEN)),
                Ids::Numbered => Some(format!("functions.{}:{count}", call.name)),
            };
            count += 1;
            let id = std::mem::replace(&mut call.id, written.clone());
            open.push(Open { id, written, name: call.name.clone() });
        }
        if message.role != "tool" {
            continue;
        }
        let known = message.tool_call_id.as_ref();
        let by_id = open.iter().position(|call| call.id.is_some() && call.id.as_ref() == known);
        let is_free = |call: &Open| call.id.is_none() || known.is_none();
        let name = message.name.as_ref();
        let by_name = || open.iter().position(|call| is_free(call) && Some(&call.name) == name);
        let by_order = || open.iter().position(is_free);
        match by_id.or_else(by_name).or_else(by_order).map(|at| open.remove(at)) {
            Some(call) => {
                if ids != Ids::Own {
                    message.tool_call_id = call.written;
                }
                if names {
                    message.name.get_or_insert(call.name);
                }
            }
            None if ids == Ids::Nine => {
                message.tool_call_id = Some(coded(message.tool_call_id.as_deref(), count, NINE));
            }
            None => {}
        }
    }
}

/// Characters of ids, and the length of ids.
type Code = (&'static [u8], usize);

const NINE: Code = (b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", 9);
const TEN: Code = (b"0123456789abcdefghijklmnopqrstuvwxyz", 10);

/// Returns an id of a code: the given one, if it is one, or one that depends on it alone.
fn coded(id: Option<&str>, number: usize, (digits, length): Code) -> String {
    let id = id.map_or_else(|| format!("call {number}"), str::to_owned);
    if id.len() == length && id.bytes().all(|byte| digits.contains(&byte)) {
        return id;
    }
    // FNV-1a: http://www.isthe.com/chongo/tech/comp/fnv/
    let mut hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let count = digits.len() as u64;
    let mut digit = || {
        let digit = digits[(hash % count) as usize];
        hash /= count;
        char::from(digit)
    };
    (0..length).map(|_| digit()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ToolCall;

    fn calls(ids: &[Option<&str>]) -> Message {
        let call = |id: &Option<&str>| ToolCall {
            id: id.map(str::to_owned),
            name: "f".into(),
            arguments: "{}".into(),
        };
        Message { tool_calls: ids.iter().map(call).collect(), ..Message::new("assistant", "") }
    }

    fn result(id: Option<&str>) -> Message {
        Message { tool_call_id: id.map(str::to_owned), ..Message::new("tool", "") }
    }

    fn ids_of(messages: &[Message]) -> Vec<String> {
        let calls = messages.iter().flat_map(|message| &message.tool_calls);
        let results = messages.iter().filter(|message| message.role == "tool");
        let results = results.map(|message| message.tool_call_id.clone());
        calls.map(|call| call.id.clone()).chain(results).map(Option::unwrap_or_default).collect()
    }

    #[test]
    fn ids_of_nine_characters() {
        let mut all = [calls(&[Some("call_1"), Some("abcDEF123"), None]), result(Some("call_1"))];
        complete(&mut all, Ids::Nine, false);
        let ids = ids_of(&all);
        assert!(
            ids.iter().all(|id| id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()))
        );
        assert_eq!((ids[1].as_str(), &ids[3]), ("abcDEF123", &ids[0]));
        assert!(ids[0] != ids[2]);
        // The same id gives the same prompt, so that its KV blocks can be used again.
        let mut again = [calls(&[Some("call_1")]), result(None)];
        complete(&mut again, Ids::Nine, false);
        assert_eq!(ids_of(&again), [ids[0].clone(), ids[0].clone()]);
    }

    #[test]
    fn ids_with_numbers() {
        let mut all = [
            calls(&[Some("a"), Some("b")]),
            result(Some("b")),
            result(Some("a")),
            calls(&[None]),
            result(None),
        ];
        complete(&mut all, Ids::Numbered, true);
        let expected = [0, 1, 2, 1, 0, 2].map(|number| format!("functions.f:{number}"));
        assert_eq!(ids_of(&all), expected);
        assert!(all[1].name.as_deref() == Some("f"));
    }

    #[test]
    fn results_without_ids_belong_to_the_calls_of_their_tool() {
        let mut all = [calls(&[None, None]), result(None), result(None)];
        all[0].tool_calls[1].name = "g".into();
        all[1].name = Some("g".into());
        complete(&mut all, Ids::Numbered, false);
        let expected = ["functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0"];
        assert_eq!(ids_of(&all), expected);
    }

    #[test]
    fn own_ids_stay() {
        let mut all = [calls(&[Some("a")]), result(Some("a")), result(Some("x"))];
        complete(&mut all, Ids::Own, false);
        assert_eq!(ids_of(&all), ["a", "a", "x"]);
        assert_eq!(all[1].name, None);
    }
}

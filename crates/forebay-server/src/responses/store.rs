//! Conversations of earlier responses, in bounded memory.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use forebay_chat::Message;
use serde_json::Value;

/// Most bytes of text that the conversations of one key have.
const KEY_BYTES_MAX: usize = 16 << 20;
/// Most bytes of text that all conversations have.
const BYTES_MAX: usize = 128 << 20;

/// Hash of the key that a client sent, in hexadecimal digits.
pub type Owner = String;

/// A response that later requests can continue.
#[derive(Clone)]
pub struct Stored {
    pub id: String,
    /// The conversation with the answer, without instructions.
    pub messages: Vec<Message>,
    /// The items of the request.
    pub input: Vec<Value>,
    /// The response as the client got it.
    pub response: Value,
}

struct Entry {
    owner: Owner,
    bytes: usize,
    stored: Stored,
}

/// The last responses of every key. The oldest ones give way to new ones.
#[derive(Default)]
pub struct Store {
    entries: Mutex<VecDeque<Entry>>,
}

impl Store {
    pub fn insert(&self, owner: Owner, stored: Stored) {
        let input = stored.input.iter().map(|item| item.to_string().len());
        let bytes = stored.messages.iter().map(size).sum::<usize>()
            + input.sum::<usize>()
            + stored.response.to_string().len();
        if bytes > KEY_BYTES_MAX {
            return;
        }
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = |entries: &VecDeque<Entry>, of: Option<&Owner>| -> usize {
            let own = entries.iter().filter(|entry| of.is_none_or(|of| entry.owner == *of));
            own.map(|entry| entry.bytes).sum()
        };
        while sum(&entries, Some(&owner)) + bytes > KEY_BYTES_MAX {
            let oldest = entries.iter().position(|entry| entry.owner == owner);
            entries.remove(oldest.expect("the key has entries"));
        }
        // Responses of a key that has few stay, whatever others store.
        while sum(&entries, None) + bytes > BYTES_MAX {
            let heaviest =
                entries.iter().map(|entry| (sum(&entries, Some(&entry.owner)), &entry.owner));
            let Some((_, owner)) = heaviest.max().map(|(sum, owner)| (sum, owner.clone())) else {
                break;
            };
            let oldest = entries.iter().position(|entry| entry.owner == owner);
            entries.remove(oldest.expect("the key has entries"));
        }
        entries.push_back(Entry { owner, bytes, stored });
    }

    /// Returns a response of this key.
    pub fn get(&self, owner: &str, id: &str) -> Option<Stored> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let found = entries.iter().find(|entry| entry.owner == owner && entry.stored.id == id);
        found.map(|entry| entry.stored.clone())
    }

    /// Forgets a response. Returns false if the key has no such response.
    pub fn remove(&self, owner: &str, id: &str) -> bool {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let found = entries.iter().position(|entry| entry.owner == owner && entry.stored.id == id);
        found.is_some_and(|at| entries.remove(at).is_some())
    }
}

/// Returns about how many bytes of memory a message takes.
fn size(message: &Message) -> usize {
    let calls = message.tool_calls.iter().map(|call| call.name.len() + call.arguments.len() + 128);
    let reasoning = message.reasoning.as_ref().map_or(0, String::len);
    256 + message.content.len() + reasoning + calls.sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(id: usize, bytes: usize) -> Stored {
        let messages = vec![Message::new("user", "x".repeat(bytes))];
        Stored { id: id.to_string(), messages, input: Vec::new(), response: Value::Null }
    }

    #[test]
    fn memory_is_bounded_for_each_key_and_for_all() {
        let store = Store::default();
        let (first, second) = ("1", "2");
        store.insert(second.to_owned(), stored(100, 1000));
        for id in 0..5 {
            store.insert(first.to_owned(), stored(id, KEY_BYTES_MAX / 4));
        }
        assert!(store.get(first, "0").is_none() && store.get(first, "4").is_some());
        // Another key's conversations are not touched, not seen and not deleted.
        assert!(store.get(second, "100").is_some() && store.get(first, "100").is_none());
        assert!(!store.remove(first, "100") && store.remove(second, "100"));
        assert!(!store.remove(second, "100"));
        // One that is too large is not kept, and takes nobody's place.
        store.insert(first.to_owned(), stored(9, KEY_BYTES_MAX));
        assert!(store.get(first, "9").is_none() && store.get(first, "4").is_some());
        store.insert("small".to_owned(), stored(1, 1000));
        for owner in 0..40 {
            store.insert(owner.to_string(), stored(7, KEY_BYTES_MAX / 2));
        }
        let entries = store.entries.lock().unwrap();
        assert!(entries.iter().map(|entry| entry.bytes).sum::<usize>() <= BYTES_MAX);
        assert!(entries.iter().any(|entry| entry.owner == "small"), "it gives way to nobody");
        assert_eq!(entries.back().unwrap().owner, "39");
    }
}

//! Lists that a template changes with `append`, `extend`, `insert` and `pop`.
//!
//! The engine's lists never change. In a template that calls one of these methods, every list between brackets is passed to a
//! function, which makes a [`ChangeableList`] of it. The filter `list` makes one, too. Other templates are compiled as they are.
//!
//! Unlike in Python, slices and sums of lists see later changes, and a loop does not see what its own body appends.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Enumerator, Object, ObjectRepr, Tuple, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};

/// Function that makes a changeable list of a list. No template has a variable of this name.
const FUNCTION: &str = "__changeable_list";
/// Methods that change a list.
const METHODS: [&str; 4] = ["append", "extend", "insert", "pop"];
/// Words after which a bracket begins a list. After other names it begins a subscript.
const WORDS_BEFORE_LISTS: [&str; 8] = ["and", "do", "elif", "else", "if", "in", "not", "or"];
/// Deepest nesting of a value that is put into a list.
const DEPTH_MAX: usize = 100;
/// Items that are moved for as long as a step takes.
const MOVED_PER_STEP: usize = 32;

/// Returns true if the method changes a list.
pub fn changes(method: &str) -> bool {
    METHODS.contains(&method)
}

/// Last token, as far as it says what a bracket means.
#[derive(Clone, Copy)]
enum Last {
    Dot,
    Name {
        follows_dot: bool,
        changes: bool,
        precedes_list: bool,
    },
    /// The end of a value.
    Value,
    Other,
}

/// Returns the source with every list between brackets passed to [`FUNCTION`], or `None` if the template changes no list or its
/// brackets do not match.
pub fn with_changeable_lists(source: &str, syntax: SyntaxConfig) -> Option<String> {
    let (mut inserted, mut open) = (Vec::new(), Vec::new());
    let (mut last, mut changes_lists) = (Last::Other, false);
    for token in tokenize(source, false, syntax) {
        let (token, span) = token.ok()?;
        let next = match &token {
            Token::Dot => Last::Dot,
            Token::Ident(name) => Last::Name {
                follows_dot: matches!(last, Last::Dot),
                changes: changes(name),
                precedes_list: WORDS_BEFORE_LISTS.contains(name),
            },
            Token::Str(_) | Token::String(_) | Token::ParenClose | Token::BraceClose => Last::Value,
            Token::Int(_) | Token::Int128(_) | Token::Float(_) => Last::Value,
            Token::BracketOpen => {
                let is_list = match last {
                    Last::Name { follows_dot, precedes_list, .. } => !follows_dot && precedes_list,
                    Last::Value => false,
                    Last::Dot | Last::Other => true,
                };
                open.push(is_list);
                if is_list {
                    inserted.push((span.start_offset as usize, true));
                }
                Last::Other
            }
            Token::BracketClose => {
                if open.pop()? {
                    inserted.push((span.end_offset as usize, false));
                }
                Last::Value
            }
            Token::BlockEnd | Token::VariableEnd if !open.is_empty() => return None,
            Token::ParenOpen => {
                changes_lists |=
                    matches!(last, Last::Name { follows_dot: true, changes: true, .. });
                Last::Other
            }
            _ => Last::Other,
        };
        last = next;
    }
    if !changes_lists || !open.is_empty() {
        return None;
    }
    let (mut out, mut from) = (String::with_capacity(source.len()), 0);
    for (at, begins) in inserted {
        out.push_str(source.get(from..at)?);
        out.push_str(if begins { FUNCTION } else { ")" });
        if begins {
            out.push('(');
        }
        from = at;
    }
    out.push_str(source.get(from..)?);
    Some(out)
}

/// Adds [`FUNCTION`] and the filter `list`. Lists together may take as much work as `steps` steps.
pub fn install(environment: &mut Environment<'static>, steps: u64) {
    let work = Arc::new(Work(AtomicU64::new(steps)));
    let own = work.clone();
    environment.add_function(FUNCTION, move |list: Value| match list.downcast_object_ref() {
        Some(items) => ChangeableList::of(Vec::clone(items), &own),
        None => Ok(list),
    });
    environment.add_filter("list", move |value: Value| {
        let items = value.try_iter().map_err(|error| {
            let why = "cannot convert value to list";
            Error::new(ErrorKind::InvalidOperation, why).with_source(error)
        })?;
        ChangeableList::of(items.checked().collect::<Result<_, _>>()?, &work)
    });
}

/// Work that lists may still take.
#[derive(Debug)]
struct Work(AtomicU64);

impl Work {
    fn take(&self, steps: usize) -> Result<(), Error> {
        let left = |left: u64| left.checked_sub(steps as u64);
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left);
        taken.map(|_| ()).map_err(|_| Error::from(ErrorKind::OutOfFuel))
    }
}

/// A list that changes. No value that is put into it leads back to it.
#[derive(Debug)]
struct ChangeableList {
    items: Mutex<Vec<Value>>,
    work: Arc<Work>,
}

impl ChangeableList {
    fn of(items: Vec<Value>, work: &Arc<Work>) -> Result<Value, Error> {
        work.take(1 + items.len())?;
        Ok(Value::from_object(ChangeableList { items: Mutex::new(items), work: work.clone() }))
    }

    fn items(&self) -> MutexGuard<'_, Vec<Value>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the value as the list may hold it.
    fn settled(&self, value: Value) -> Result<Value, Error> {
        let mut walk = Walk { list: self, seen: HashMap::new() };
        Ok(walk.settle(&value, 0)?.unwrap_or(value))
    }

    /// Returns the index of an item that Python calls `index`, or of the end behind the last one.
    fn place(index: i64, len: usize) -> Option<usize> {
        match usize::try_from(index) {
            Ok(index) => Some(index).filter(|index| *index <= len),
            Err(_) => len.checked_sub(usize::try_from(index.unsigned_abs()).ok()?),
        }
    }
}

impl Object for ChangeableList {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items().get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items().len())
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        match method {
            "append" => {
                let (value,): (Value,) = from_args(args)?;
                let value = self.settled(value)?;
                self.items().push(value);
            }
            "extend" => {
                let (values,): (Value,) = from_args(args)?;
                let mut more = Vec::new();
                for value in values.try_iter()?.checked() {
                    more.push(self.settled(value?)?);
                }
                self.items().extend(more);
            }
            "insert" => {
                let (index, value): (i64, Value) = from_args(args)?;
                let value = self.settled(value)?;
                let mut items = self.items();
                let end = if index < 0 { 0 } else { items.len() };
                let at = ChangeableList::place(index, items.len()).unwrap_or(end);
                self.work.take((items.len() - at) / MOVED_PER_STEP)?;
                items.insert(at, value);
            }
            "pop" => {
                let (index,): (Option<i64>,) = from_args(args)?;
                let mut items = self.items();
                let at = ChangeableList::place(index.unwrap_or(-1), items.len());
                let at = at.filter(|at| *at < items.len()).ok_or_else(|| {
                    Error::new(ErrorKind::InvalidOperation, "pop: the list has no such item")
                })?;
                self.work.take((items.len() - at) / MOVED_PER_STEP)?;
                return Ok(items.remove(at));
            }
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        }
        Ok(Value::from(()))
    }
}

/// A walk through a value that is put into a list.
struct Walk<'a> {
    list: &'a ChangeableList,
    /// Lists that were visited. They are kept, so that their addresses stay theirs.
    seen: HashMap<*const ChangeableList, Arc<ChangeableList>>,
}

impl Walk<'_> {
    /// Makes sure that a value does not lead to the list, and never will. Slices and other values that read a list whenever they are
    /// used become lists. Returns the value to take instead, if it is another one.
    fn settle(&mut self, value: &Value, depth: usize) -> Result<Option<Value>, Error> {
        self.list.work.take(1)?;
        let Some(object) = value.as_object() else { return Ok(None) };
        let refused = |why: String| Err(Error::new(ErrorKind::InvalidOperation, why));
        if depth > DEPTH_MAX {
            return refused("a value that a list gets is nested too deep".to_owned());
        }
        if let Some(list) = value.downcast_object::<ChangeableList>() {
            if std::ptr::eq(&raw const *list, self.list) {
                return refused("a list cannot hold itself".to_owned());
            }
            if self.seen.insert(&raw const *list, list.clone()).is_none() {
                let items = list.items().clone();
                for (index, item) in items.iter().enumerate() {
                    if let Some(settled) = self.settle(item, depth + 1)? {
                        list.items()[index] = settled;
                    }
                }
            }
            return Ok(None);
        }
        if let Some(items) = value.downcast_object_ref::<Vec<Value>>() {
            return Ok(self.settle_all(items, depth)?.map(Value::from));
        }
        if let Some(items) = value.downcast_object_ref::<Tuple>() {
            return Ok(self.settle_all(items, depth)?.map(|items| Tuple::from(items).into()));
        }
        match value.kind() {
            ValueKind::Map if object.type_name() == type_of_maps() => self.settle_map(value, depth),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut items = Vec::new();
                for item in value.try_iter()?.checked() {
                    self.list.work.take(1)?;
                    items.push(item?);
                }
                let settled = self.settle_all(&items, depth)?.unwrap_or(items);
                ChangeableList::of(settled, &self.list.work).map(Some)
            }
            kind => refused(format!("a list cannot hold this value of kind {kind}")),
        }
    }

    /// Returns all values if one of them is another one.
    fn settle_all(&mut self, values: &[Value], depth: usize) -> Result<Option<Vec<Value>>, Error> {
        let mut settled: Option<Vec<Value>> = None;
        for (index, value) in values.iter().enumerate() {
            if let Some(other) = self.settle(value, depth + 1)? {
                settled.get_or_insert_with(|| values.to_vec())[index] = other;
            }
        }
        Ok(settled)
    }

    fn settle_map(&mut self, map: &Value, depth: usize) -> Result<Option<Value>, Error> {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for key in map.try_iter()? {
            if key.as_object().is_some() {
                let why = "a list cannot hold a dictionary whose keys are lists or tuples";
                return Err(Error::new(ErrorKind::InvalidOperation, why));
            }
            values.push(map.get_item(&key)?);
            keys.push(key);
        }
        let settled = self.settle_all(&values, depth)?;
        Ok(settled.map(|values| Value::from_pairs(keys.into_iter().zip(values))))
    }
}

/// Returns the name of the type of dictionaries. Other objects may look like dictionaries, but change.
fn type_of_maps() -> &'static str {
    static NAME: OnceLock<&str> = OnceLock::new();
    NAME.get_or_init(|| {
        let map = Value::from_pairs([("key", 0)]);
        map.as_object().map_or("", |map| map.type_name())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(source: &str) -> Option<String> {
        with_changeable_lists(source, SyntaxConfig::default())
    }

    #[test]
    fn only_lists_of_templates_that_change_them_are_replaced() {
        let call = "{{ x.pop() }}";
        for source in [
            "{% set x = [1] %}{{ x[0] }}",
            "{{ x.append }}{{ [1] }}",
            "{{ append([1]) }}",
            "{% raw %}{{ x.append([1]) }}{% endraw %}",
            "{# x.append([1]) #}{{ 'x.append([1])' }}",
        ] {
            assert_eq!(changed(source), None);
        }
        // What cannot be read is left to the compiler.
        for source in
            ["{{ x.pop() }}{{ [1 }}", "{{ x.pop() }}{{ 1] }}", "{{ x.pop() ", "{{ x.pop('"]
        {
            assert_eq!(changed(source).filter(|changed| changed != source), None);
        }
        for (source, expected) in [
            ("{{ [] }}", "{{ F([]) }}"),
            ("é{{ [[1], a[b[0]], 'c'[0]] }}", "é{{ F([F([1]), a[b[0]], 'c'[0]]) }}"),
            ("{{ f([1])[0] }}{{ {'k': [1]}['k'] }}", "{{ f(F([1]))[0] }}{{ {'k': F([1])}['k'] }}"),
            ("{% if a.if[0] in [0] %}{% endif %}", "{% if a.if[0] in F([0]) %}{% endif %}"),
            (
                "{% for a in [0] if not [] %}{% endfor %}",
                "{% for a in F([0]) if not F([]) %}{% endfor %}",
            ),
            ("{% set a = b if c else [0] %}", "{% set a = b if c else F([0]) %}"),
        ] {
            let expected = expected.replace('F', FUNCTION);
            assert_eq!(changed(&format!("{source}{call}")), Some(format!("{expected}{call}")));
        }
    }
}

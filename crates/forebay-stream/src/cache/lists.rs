//! Lists of entries in order of use, oldest first. Memory is allocated only at construction.

/// Doubly linked lists in one array. An entry is in at most one list.
#[derive(Clone, Debug)]
pub(super) struct Lists {
    /// Previous and next index of every entry, followed by those of one end node for each list, which closes its ring.
    links: Vec<[u32; 2]>,
    entries: u32,
}

const BEFORE: usize = 0;
const AFTER: usize = 1;

impl Lists {
    /// Creates empty lists `0 .. lists` for entries `0 .. entries`.
    pub fn new(entries: usize, lists: usize) -> Lists {
        let links = (0..(entries + lists) as u32).map(|index| [index, index]).collect();
        Lists { links, entries: entries as u32 }
    }

    fn end(&self, list: usize) -> u32 {
        self.entries + list as u32
    }

    /// Returns the oldest entry of a list.
    pub fn first(&self, list: usize) -> Option<u32> {
        self.after(self.end(list))
    }

    /// Returns the next younger entry of the same list.
    pub fn after(&self, entry: u32) -> Option<u32> {
        let next = self.links[entry as usize][AFTER];
        (next < self.entries).then_some(next)
    }

    /// Appends an entry that is in no list, as the youngest of `list`.
    pub fn push(&mut self, list: usize, entry: u32) {
        let end = self.end(list);
        self.link_before(end, entry);
    }

    /// Inserts an entry that is in no list, as the oldest of `list`.
    pub fn push_oldest(&mut self, list: usize, entry: u32) {
        let next = self.links[self.end(list) as usize][AFTER];
        self.link_before(next, entry);
    }

    /// Removes an entry from its list.
    pub fn remove(&mut self, entry: u32) {
        let [before, after] = self.links[entry as usize];
        self.links[before as usize][AFTER] = after;
        self.links[after as usize][BEFORE] = before;
    }

    fn link_before(&mut self, next: u32, entry: u32) {
        let before = std::mem::replace(&mut self.links[next as usize][BEFORE], entry);
        self.links[before as usize][AFTER] = entry;
        self.links[entry as usize] = [before, next];
    }
}

#[cfg(test)]
mod tests {
    use super::Lists;

    fn content(lists: &Lists, list: usize) -> Vec<u32> {
        std::iter::successors(lists.first(list), |&entry| lists.after(entry)).collect()
    }

    #[test]
    fn order_is_kept() {
        let mut lists = Lists::new(6, 2);
        for entry in [3, 1, 4] {
            lists.push(0, entry);
        }
        lists.push(1, 5);
        lists.push_oldest(0, 2);
        assert_eq!(content(&lists, 0), [2, 3, 1, 4]);
        lists.remove(3);
        lists.push(1, 3);
        lists.remove(5);
        assert_eq!((content(&lists, 0), content(&lists, 1)), (vec![2, 1, 4], vec![3]));
        for entry in [2, 1, 4] {
            lists.remove(entry);
        }
        assert_eq!(lists.first(0), None);
    }
}

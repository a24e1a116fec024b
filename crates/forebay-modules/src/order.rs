//! The order in which modules are used: recorded, and expected again.

/// Number of a module that has weights of its own.
pub type Unit = usize;
/// Number of a module whose calls are passes, such as one part of a pipeline.
pub type Root = usize;

/// The order of use of modules in passes, and what is expected next.
///
/// A pass is a call of a root. It is expected to use modules as the last whole pass of this root did, and the next pass is expected
/// to be that of the root which followed last time. Whatever comes instead is recorded, so that a new order is expected from the
/// next pass on.
#[derive(Debug)]
pub struct UseOrder {
    roots: Vec<Expected>,
    /// The root of the last pass, which may have ended.
    current: Option<Root>,
    /// True while a pass runs.
    runs: bool,
    /// The modules that this pass has used.
    used: Vec<Unit>,
    /// The modules that this pass and the next one are expected to use.
    upcoming: Vec<Unit>,
    /// Number of expected uses of this pass: the first of `upcoming`.
    of_pass: usize,
    /// Places in `upcoming` of each module, ascending.
    places: Vec<Vec<usize>>,
    /// Where this pass is in `upcoming`.
    at: usize,
    deviations: u64,
    /// Expected uses since the last deviation.
    expected: u64,
}

#[derive(Debug)]
struct Expected {
    order: Vec<Unit>,
    next: Root,
    /// Passes of late.
    passes: u64,
}

/// Passes of all roots together after which older ones count half.
const LATE: u64 = 256;

impl UseOrder {
    /// Begins with predictions: for each root, the modules in the order in which a pass may use them. There are `units` modules.
    pub fn new(units: usize, predictions: Vec<Vec<Unit>>) -> UseOrder {
        let roots = predictions.into_iter().enumerate();
        let roots = roots.map(|(next, order)| Expected { order, next, passes: 1 }).collect();
        let mut new = UseOrder {
            roots,
            current: None,
            runs: false,
            used: Vec::new(),
            upcoming: Vec::new(),
            of_pass: 0,
            places: vec![Vec::new(); units],
            at: 0,
            deviations: 0,
            expected: 0,
        };
        if !new.roots.is_empty() {
            new.expect(0);
        }
        new
    }

    /// Expects a pass of this root and the one that follows it.
    fn expect(&mut self, root: Root) {
        self.places.iter_mut().for_each(Vec::clear);
        self.upcoming.clear();
        let of = &self.roots[root];
        self.upcoming.extend(&of.order);
        self.of_pass = self.upcoming.len();
        self.upcoming.extend(&self.roots[of.next].order);
        for (at, unit) in self.upcoming.iter().enumerate() {
            self.places[*unit].push(at);
        }
        self.at = 0;
    }

    /// Notes that a pass of this root begins. What an unfinished pass before it has used is forgotten.
    pub fn begin(&mut self, root: Root) {
        if let Some(before) = self.current {
            self.roots[before].next = root;
        }
        self.current = Some(root);
        (self.runs, self.used) = (true, Vec::new());
        self.expect(root);
    }

    /// Notes that the pass has ended as a whole. It is what is expected next time. Returns its root, if one was running.
    pub fn end(&mut self) -> Option<Root> {
        let root = self.current.filter(|_| self.runs)?;
        self.runs = false;
        if self.roots.iter().map(|of| of.passes).sum::<u64>() >= LATE {
            self.roots.iter_mut().for_each(|of| of.passes = of.passes.div_ceil(2));
        }
        let of = &mut self.roots[root];
        of.passes += 1;
        if of.order != self.used {
            of.order = std::mem::take(&mut self.used);
        }
        self.expect(self.roots[root].next);
        Some(root)
    }

    /// Notes that a module is used. Returns true if it was expected.
    pub fn note(&mut self, unit: Unit) -> bool {
        if !self.runs {
            return false;
        }
        self.used.push(unit);
        let expected = self.next_place(unit).filter(|place| *place < self.of_pass);
        let is_next = expected == Some(self.at);
        self.at = expected.map_or(self.at, |place| place + 1);
        match is_next {
            true => self.expected += 1,
            false => (self.deviations, self.expected) = (self.deviations + 1, 0),
        }
        is_next
    }

    fn next_place(&self, unit: Unit) -> Option<usize> {
        let places = &self.places[unit];
        places.get(places.partition_point(|place| *place < self.at)).copied()
    }

    /// Returns after how many other expected uses this module is used, or `None` if it is not expected.
    pub fn distance(&self, unit: Unit) -> Option<usize> {
        Some(self.next_place(unit)? - self.at)
    }

    /// Returns the modules that are expected, the next one first.
    pub fn upcoming(&self) -> impl Iterator<Item = Unit> {
        self.upcoming[self.at..].iter().copied()
    }

    /// Returns the modules in the order in which passes of all roots use them, and how many passes of late were of that root. A module that
    /// is used several times is there several times.
    pub fn uses(&self) -> impl Iterator<Item = (Unit, u64)> {
        self.roots.iter().flat_map(|of| of.order.iter().map(|unit| (*unit, of.passes)))
    }

    /// Returns how many passes of late were of this root.
    pub fn passes(&self, root: Root) -> u64 {
        self.roots[root].passes
    }

    /// Returns the modules that the next pass of a root is expected to use.
    pub fn expected(&self, root: Root) -> &[Unit] {
        &self.roots[root].order
    }

    /// Returns how many uses in a row, up to the last one, were the expected ones.
    pub fn expected_in_a_row(&self) -> u64 {
        self.expected
    }

    /// Returns how many uses were not the expected ones.
    pub fn deviations(&self) -> u64 {
        self.deviations
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(order: &mut UseOrder, root: Root, units: &[Unit]) -> Vec<bool> {
        order.begin(root);
        let expected = units.iter().map(|unit| order.note(*unit)).collect();
        order.end();
        expected
    }

    #[test]
    fn the_last_whole_pass_is_expected_again() {
        let mut order = UseOrder::new(4, vec![vec![0, 1, 2, 3]]);
        assert_eq!(order.upcoming().collect::<Vec<_>>(), [0, 1, 2, 3, 0, 1, 2, 3]);
        // The prediction was wrong: 2 comes first, and 1 is used twice.
        assert_eq!(pass(&mut order, 0, &[2, 0, 1, 1, 3]), [false, false, false, false, true]);
        assert_eq!(pass(&mut order, 0, &[2, 0, 1, 1, 3]), [true; 5]);
        // A pass that skips modules.
        assert_eq!(pass(&mut order, 0, &[2, 1, 3]), [true, false, false]);
        assert_eq!(order.expected_in_a_row(), 0);
        assert_eq!(pass(&mut order, 0, &[2, 1, 3]), [true; 3]);
        assert_eq!((order.deviations(), order.expected_in_a_row()), (6, 3));
        // A pass that ends early changes nothing.
        order.begin(0);
        order.note(2);
        assert_eq!(pass(&mut order, 0, &[2, 1, 3]), [true; 3]);
    }

    #[test]
    fn distances_count_expected_uses_of_this_pass_and_the_next() {
        let mut order = UseOrder::new(4, vec![vec![0, 1, 2]]);
        order.begin(0);
        order.note(0);
        let distances = |order: &UseOrder| [0, 1, 2, 3].map(|unit| order.distance(unit));
        assert_eq!(distances(&order), [Some(2), Some(0), Some(1), None]);
        order.note(2);
        assert_eq!(distances(&order), [Some(0), Some(1), Some(2), None]);
        // A module that is not expected moves nothing.
        order.note(3);
        assert_eq!(distances(&order), [Some(0), Some(1), Some(2), None]);
        order.end();
        assert_eq!(distances(&order), [Some(0), None, Some(1), Some(2)]);
    }

    #[test]
    fn the_root_that_followed_last_time_is_expected_to_follow() {
        let mut order = UseOrder::new(4, vec![vec![0], vec![1, 2], vec![3]]);
        for _ in 0..2 {
            for (root, units) in [(0, &[0][..]), (1, &[1, 2]), (1, &[1, 2]), (2, &[3])] {
                assert_eq!(pass(&mut order, root, units), vec![true; units.len()]);
            }
        }
        assert_eq!(order.upcoming().collect::<Vec<_>>(), [0, 1, 2], "the first root follows");
        order.begin(1);
        assert_eq!(order.upcoming().collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn uses_outside_passes_are_not_recorded() {
        let mut order = UseOrder::new(2, vec![vec![0, 1]]);
        assert!(!order.note(1));
        assert_eq!(pass(&mut order, 0, &[0, 1]), [true; 2]);
        order.note(0);
        assert_eq!(pass(&mut order, 0, &[0, 1]), [true; 2]);
        assert_eq!(order.deviations(), 0);
    }
}

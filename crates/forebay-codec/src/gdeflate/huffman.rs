//! Huffman codes of Deflate: their lengths, code words and decoding tables (RFC 1951, sections 3.2.2 and 3.2.7).

/// Most bits of a code word for literals, lengths and distances.
pub(super) const BITS_MAX: usize = 15;

/// Values and extra bits of length symbols, from symbol 257 on. The last is that of Deflate64.
pub(super) const LENGTHS: [(u16, u8); 29] = [
    (3, 0),
    (4, 0),
    (5, 0),
    (6, 0),
    (7, 0),
    (8, 0),
    (9, 0),
    (10, 0),
    (11, 1),
    (13, 1),
    (15, 1),
    (17, 1),
    (19, 2),
    (23, 2),
    (27, 2),
    (31, 2),
    (35, 3),
    (43, 3),
    (51, 3),
    (59, 3),
    (67, 4),
    (83, 4),
    (99, 4),
    (115, 4),
    (131, 5),
    (163, 5),
    (195, 5),
    (227, 5),
    (3, 16),
];

/// Returns value and extra bits of a distance symbol from 0 to 31, as in Deflate64.
pub(super) const fn distance_of(symbol: usize) -> (u16, u8) {
    if symbol < 4 {
        return (symbol as u16 + 1, 0);
    }
    let extra = symbol / 2 - 1;
    (((2 + symbol % 2) << extra) as u16 + 1, extra as u8)
}

/// The order in which the lengths of the code for code lengths are stored.
pub(super) const LENGTH_ORDER: [usize; 19] =
    [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// Returns the lengths of the fixed code for literals and lengths.
pub(super) fn fixed_literal_lengths() -> [u8; 288] {
    std::array::from_fn(|symbol| match symbol {
        144..256 => 9,
        256..280 => 7,
        _ => 8,
    })
}

/// What an entry of a decoding table stands for.
pub(super) const LITERAL: u32 = 0;
pub(super) const MATCH: u32 = 1;
pub(super) const END: u32 = 2;
/// The next bits choose an entry of a second table. Its index in units of [`Entry::value`].
const SECOND: u32 = 3;

/// An entry: bits 0 to 3 are the bits of the code word (0: there is no such code word), 4 to 8 the extra bits, 9 and 10 the kind, 16 to 31
/// the value.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Entry(u32);

impl Entry {
    pub const fn new(kind: u32, value: u16, extra: u8) -> Entry {
        Entry((value as u32) << 16 | kind << 9 | (extra as u32) << 4)
    }

    #[inline(always)]
    pub const fn bits(self) -> u32 {
        self.0 & 15
    }

    #[inline(always)]
    pub const fn extra(self) -> u32 {
        self.0 >> 4 & 31
    }

    #[inline(always)]
    pub const fn kind(self) -> u32 {
        self.0 >> 9 & 3
    }

    #[inline(always)]
    pub const fn value(self) -> u32 {
        self.0 >> 16
    }
}

/// A decoding table: `1 << FIRST` entries, and behind them second tables for longer code words.
pub(super) struct Decoding<const FIRST: usize, const SIZE: usize> {
    entries: [Entry; SIZE],
}

impl<const FIRST: usize, const SIZE: usize> Decoding<FIRST, SIZE> {
    pub fn new() -> Self {
        Decoding { entries: [Entry(0); SIZE] }
    }

    /// Fills the table for a code with these lengths. Returns false if the lengths are those of no code, or of one that some bits do not
    /// belong to: only a code with one symbol of one bit, or with no symbol, may be so.
    #[must_use]
    pub fn fill(&mut self, lengths: &[u8], entry_of: impl Fn(usize) -> Option<Entry>) -> bool {
        let counts = words_by_length(lengths);
        let space: u32 = (1..=BITS_MAX).map(|bits| counts[bits] << (BITS_MAX - bits)).sum();
        let symbols: u32 = counts.iter().sum();
        let incomplete = symbols == 0 || symbols == 1 && counts[1] == 1;
        if space != 1 << BITS_MAX && !incomplete {
            return false;
        }
        let second_bits = BITS_MAX.saturating_sub(FIRST);
        self.entries[..1 << FIRST].fill(Entry(0));
        let mut end = 1 << FIRST;
        let mut words = Words::new(&counts);
        for (symbol, &length) in lengths.iter().enumerate() {
            let bits = usize::from(length);
            if bits == 0 {
                continue;
            }
            let word = usize::from(words.next(bits));
            let Some(entry) = entry_of(symbol) else { continue };
            let entry = Entry(entry.0 | bits as u32);
            if bits <= FIRST {
                self.entries[..1 << FIRST][word..].iter_mut().step_by(1 << bits).for_each(|to| {
                    *to = entry;
                });
                continue;
            }
            let first = &mut self.entries[word & ((1 << FIRST) - 1)];
            if first.kind() != SECOND {
                if end + (1 << second_bits) > SIZE {
                    return false;
                }
                *first = Entry(Entry::new(SECOND, end as u16, 0).0 | 1);
                self.entries[end..end + (1 << second_bits)].fill(Entry(0));
                end += 1 << second_bits;
            }
            let start = self.entries[word & ((1 << FIRST) - 1)].value() as usize;
            let second = &mut self.entries[start..start + (1 << second_bits)];
            second[word >> FIRST..].iter_mut().step_by(1 << (bits - FIRST)).for_each(|to| {
                *to = entry;
            });
        }
        true
    }

    /// Returns the entry for the code word that begins with the lowest of `bits`.
    #[inline(always)]
    pub fn entry(&self, bits: u64) -> Entry {
        let entry = self.entries[bits as usize & ((1 << FIRST) - 1)];
        if entry.kind() != SECOND {
            return entry;
        }
        let mask = (1 << BITS_MAX.saturating_sub(FIRST)) - 1;
        let at = entry.value() as usize + ((bits >> FIRST) as usize & mask);
        self.entries.get(at).copied().unwrap_or_default()
    }
}

/// Returns the number of code words of every length. Symbols of length 0 have none.
fn words_by_length(lengths: &[u8]) -> [u32; BITS_MAX + 1] {
    let mut counts = [0; BITS_MAX + 1];
    lengths.iter().for_each(|&length| counts[usize::from(length & 15)] += 1);
    counts[0] = 0;
    counts
}

/// The next code word of every length, in the order of symbols.
struct Words([u16; BITS_MAX + 1]);

impl Words {
    fn new(counts: &[u32; BITS_MAX + 1]) -> Words {
        let (mut next, mut word) = ([0_u16; BITS_MAX + 1], 0_u32);
        for bits in 1..=BITS_MAX {
            word = (word + counts[bits - 1]) << 1;
            next[bits] = word as u16;
        }
        Words(next)
    }

    /// Returns the next code word of `bits` bits, at least one, with its first bit as the lowest bit.
    fn next(&mut self, bits: usize) -> u16 {
        let word = self.0[bits].reverse_bits() >> (16 - bits);
        self.0[bits] += 1;
        word
    }
}

/// Returns code words with their first bit as the lowest bit.
pub(super) fn code_words<const N: usize>(lengths: &[u8; N]) -> [u16; N] {
    let mut words = Words::new(&words_by_length(lengths));
    lengths.map(|length| if length == 0 { 0 } else { words.next(usize::from(length)) })
}

/// Returns lengths of a good code with at most `most` bits a word. At least two symbols get a word, so that every code is complete.
pub(super) fn lengths_of<const N: usize>(counts: &[u32; N], most: usize) -> [u8; N] {
    let mut symbols: Vec<(u32, usize)> = Vec::with_capacity(N);
    symbols.extend(counts.iter().enumerate().filter(|(_, n)| **n > 0).map(|(s, n)| (*n, s)));
    let unused = counts.iter().enumerate().filter(|(_, n)| **n == 0).map(|(s, _)| (1, s));
    symbols.extend(unused.take(2_usize.saturating_sub(symbols.len())));
    symbols.sort_unstable();
    let mut of_length = [0_u32; 64];
    for depth in depths(&symbols) {
        of_length[usize::from(depth).min(most)] += 1;
    }
    // Words that were too long take too much of the code space. Each step makes one shorter word longer.
    let mut space: u64 = (1..=most).map(|bits| u64::from(of_length[bits]) << (most - bits)).sum();
    while space > 1 << most {
        of_length[most] -= 1;
        if let Some(bits) = (1..most).rev().find(|&bits| of_length[bits] > 0) {
            of_length[bits] -= 1;
            of_length[bits + 1] += 2;
        }
        space -= 1;
    }
    let mut lengths = [0; N];
    let mut rarest = symbols.iter();
    for bits in (1..=most).rev() {
        for (_, symbol) in rarest.by_ref().take(of_length[bits] as usize) {
            lengths[*symbol] = bits as u8;
        }
    }
    lengths
}

/// Returns the depth of every leaf in a Huffman tree; `leaves` are counts by ascending number, at least two.
fn depths(leaves: &[(u32, usize)]) -> Vec<u8> {
    let n = leaves.len();
    // Nodes 0 to n - 1 are leaves; the others are inner nodes, which come into being by ascending count.
    let mut counts: Vec<u64> = leaves.iter().map(|(count, _)| u64::from(*count)).collect();
    let mut parent = vec![0; 2 * n - 1];
    let (mut leaf, mut inner) = (0, n);
    while counts.len() < 2 * n - 1 {
        let new = counts.len();
        let mut sum = 0;
        for _ in 0..2 {
            let take_leaf = leaf < n && (inner >= new || counts[leaf] <= counts[inner]);
            let node = if take_leaf { &mut leaf } else { &mut inner };
            sum += counts[*node];
            parent[*node] = new;
            *node += 1;
        }
        counts.push(sum);
    }
    let mut depth = vec![0_u8; 2 * n - 1];
    for node in (0..2 * n - 2).rev() {
        depth[node] = depth[parent[node]].saturating_add(1).min(63);
    }
    depth.truncate(n);
    depth
}

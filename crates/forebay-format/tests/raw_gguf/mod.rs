//! GGUF files written byte by byte, so that tests can make them invalid in any way.

/// Entry of the tensor table, which may be false.
#[derive(Clone)]
pub struct RawTensor {
    pub name: Vec<u8>,
    /// Dimensions in the file's order: the contiguous dimension first.
    pub dimensions: Vec<u64>,
    pub ty: u32,
    pub offset: u64,
}

impl RawTensor {
    pub fn f32(name: &str, dimensions: &[u64], offset: u64) -> Self {
        Self { name: name.into(), dimensions: dimensions.to_vec(), ty: 0, offset }
    }
}

/// Parts of a GGUF file. `tensor_count` and `key_count` replace the true counts if they are set.
#[derive(Clone)]
pub struct RawGguf {
    pub magic: [u8; 4],
    pub version: u32,
    pub tensor_count: Option<u64>,
    pub key_count: Option<u64>,
    /// Keys, each with its type and value as they are encoded in the file.
    pub keys: Vec<(Vec<u8>, Vec<u8>)>,
    pub tensors: Vec<RawTensor>,
    pub alignment: usize,
    pub data: Vec<u8>,
}

impl RawGguf {
    pub fn empty() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            key_count: None,
            keys: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            data: Vec::new(),
        }
    }

    /// Returns a valid file with keys of several kinds and two tensors.
    pub fn small() -> Self {
        let mut file = Self::empty();
        file.key("general.architecture", 8, &string(b"llama"));
        file.key("llama.block_count", 4, &4u32.to_le_bytes());
        file.key("flag", 7, &[1]);
        file.key("eps", 6, &1e-5f32.to_le_bytes());
        let strings = [string(b"a"), string(b"\xff\xfe"), string(b"")].concat();
        file.key("tokens", 9, &array(8, 3, &strings));
        file.key("scores", 9, &array(6, 2, &[0; 8]));
        let nested = [array(0, 2, &[1, 2]), array(7, 1, &[0])].concat();
        file.key("nested", 9, &array(9, 2, &nested));
        file.tensors.push(RawTensor::f32("a.weight", &[4, 2], 0));
        let ty = 8;
        let b = RawTensor { name: b"b.weight".into(), dimensions: vec![32, 3], ty, offset: 32 };
        file.tensors.push(b);
        file.data = (0..134).collect();
        file
    }

    pub fn key(&mut self, key: &str, ty: u32, value: &[u8]) {
        self.keys.push((key.into(), [&ty.to_le_bytes(), value].concat()));
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            out.extend(string(key));
            out.extend(value);
        }
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend((tensor.dimensions.len() as u32).to_le_bytes());
            tensor.dimensions.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.ty.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}

/// Encodes a string with its length in front.
pub fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

/// Encodes an array with the type and number of its elements in front.
pub fn array(ty: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

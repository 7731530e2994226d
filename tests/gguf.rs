//! Writes small GGUF files, for tests. Included by its path.
#![allow(dead_code)]

/// Numbers of tensor types.
pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const BF16: u32 = 30;
pub const I32: u32 = 26;

/// A file in the making. Tensors follow one another at multiples of the alignment.
#[derive(Clone)]
pub struct Gguf {
    pub version: u32,
    pub alignment: u64,
    keys: Vec<Vec<u8>>,
    tensors: Vec<(String, Vec<usize>, u32, Vec<u8>)>,
}

fn text(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s].concat()
}

impl Gguf {
    pub fn new(architecture: &str) -> Gguf {
        let mut file = Gguf { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() };
        file.string("general.architecture", architecture);
        file
    }

    /// Adds a key with a value of the type of that number.
    pub fn raw(&mut self, key: &str, kind: u32, value: &[u8]) -> &mut Gguf {
        self.keys.push([&text(key.as_bytes())[..], &kind.to_le_bytes(), value].concat());
        self
    }

    pub fn u32(&mut self, key: &str, value: u32) -> &mut Gguf {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn u16(&mut self, key: &str, value: u16) -> &mut Gguf {
        self.raw(key, 2, &value.to_le_bytes())
    }

    pub fn i32(&mut self, key: &str, value: i32) -> &mut Gguf {
        self.raw(key, 5, &value.to_le_bytes())
    }

    pub fn f32(&mut self, key: &str, value: f32) -> &mut Gguf {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub fn flag(&mut self, key: &str, value: bool) -> &mut Gguf {
        self.raw(key, 7, &[value.into()])
    }

    pub fn string(&mut self, key: &str, value: &str) -> &mut Gguf {
        self.raw(key, 8, &text(value.as_bytes()))
    }

    /// Adds an array of elements of the type of that number.
    pub fn array(&mut self, key: &str, kind: u32, elements: &[Vec<u8>]) -> &mut Gguf {
        let head = [&kind.to_le_bytes()[..], &(elements.len() as u64).to_le_bytes()].concat();
        self.raw(key, 9, &[head, elements.concat()].concat())
    }

    pub fn i32s(&mut self, key: &str, values: &[i32]) -> &mut Gguf {
        let values: Vec<Vec<u8>> = values.iter().map(|x| x.to_le_bytes().to_vec()).collect();
        self.array(key, 5, &values)
    }

    pub fn f32s(&mut self, key: &str, values: &[f32]) -> &mut Gguf {
        let values: Vec<Vec<u8>> = values.iter().map(|x| x.to_le_bytes().to_vec()).collect();
        self.array(key, 6, &values)
    }

    pub fn strings<S: AsRef<[u8]>>(&mut self, key: &str, values: &[S]) -> &mut Gguf {
        let values: Vec<Vec<u8>> = values.iter().map(|s| text(s.as_ref())).collect();
        self.array(key, 8, &values)
    }

    /// Adds a tensor. `shape`: the outermost dimension first.
    pub fn tensor(&mut self, name: &str, shape: &[usize], kind: u32, bytes: Vec<u8>) -> &mut Gguf {
        self.tensors.push((name.to_owned(), shape.to_vec(), kind, bytes));
        self
    }

    /// Adds a tensor of floats of one of three types. The values must be ones that the type has.
    pub fn floats(&mut self, name: &str, shape: &[usize], kind: u32, values: &[f32]) -> &mut Gguf {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}: {shape:?}");
        let bytes = values.iter().flat_map(|&x| match kind {
            F32 => x.to_le_bytes().to_vec(),
            F16 => to_f16(x).to_le_bytes().to_vec(),
            BF16 => ((x.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
            other => panic!("type {other} is not one of floats"),
        });
        let bytes = bytes.collect();
        self.tensor(name, shape, kind, bytes)
    }

    /// Whether there is a tensor of that name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.iter().any(|(known, ..)| known == name)
    }

    /// The same keys, and every `count`-th tensor from `number` on, as part of a split model. All parts but the first lack the keys.
    pub fn part(&self, number: usize, count: usize) -> Gguf {
        let mut part = Gguf { keys: Vec::new(), tensors: Vec::new(), ..*self };
        if number == 0 {
            part.keys.clone_from(&self.keys);
        }
        part.u16("split.no", number as u16).u16("split.count", count as u16);
        part.i32("split.tensors.count", self.tensors.len() as i32);
        part.tensors = self.tensors.iter().skip(number).step_by(count).cloned().collect();
        part
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut keys = self.keys.clone();
        if self.alignment != 32 {
            let mut more = Gguf { keys: Vec::new(), tensors: Vec::new(), ..*self };
            more.u32("general.alignment", self.alignment as u32);
            keys.extend(more.keys);
        }
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((keys.len() as u64).to_le_bytes());
        file.extend(keys.concat());
        let (mut data, align) = (Vec::new(), self.alignment as usize);
        for (name, shape, kind, bytes) in &self.tensors {
            data.resize(data.len().next_multiple_of(align), 0u8);
            file.extend(text(name.as_bytes()));
            file.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|&n| file.extend((n as u64).to_le_bytes()));
            file.extend(kind.to_le_bytes());
            file.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
        }
        file.resize(file.len().next_multiple_of(align), 0);
        file.extend(data);
        file
    }
}

/// The f16 of a number that f16 has and that is normal in it, or 0.
fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    if x == 0.0 {
        return sign;
    }
    let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
    assert!((1..31).contains(&exponent) && bits & 0x1fff == 0, "{x} is no f16");
    sign | (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16
}

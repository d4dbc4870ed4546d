//! Operands of a kernel: elements are read as f32 or integers and rounded to their type when stored.

use crate::codes::Done;
use crate::runtime::memory::DeviceMemory;
use crate::tensor::{Elem, View};
use half::{bf16, f16};

/// Operands of one run, by index.
pub(crate) struct Bench<'a> {
    pub(crate) memory: &'a mut DeviceMemory,
    pub(crate) views: &'a [Option<View>],
}

/// Rounds a value to its storage type.
pub(crate) fn rounded(value: f32, elem: Elem) -> f32 {
    match elem {
        Elem::F16 => f16::from_f32(value).to_f32(),
        Elem::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

impl Bench<'_> {
    /// Description of an operand.
    ///
    /// # Panics
    /// If the operand is absent: kernels only access operands that phase 1 has checked.
    pub(crate) fn view(&self, i: usize) -> View {
        self.views[i].clone().expect("phase 1 has seen the operand")
    }

    pub(crate) fn has(&self, i: usize) -> bool {
        self.views[i].is_some()
    }

    /// Appends `count` consecutive elements of the storage, starting at a place, to `into`.
    pub(crate) fn stretch(&self, view: &View, place: usize, count: usize, into: &mut Vec<f32>) -> Done {
        stretch(self.memory, view, place, count, into)
    }

    /// All elements, row by row.
    pub(crate) fn floats(&self, i: usize) -> Done<Vec<f32>> {
        let view = self.view(i);
        let mut all = Vec::with_capacity(view.count());
        for (place, count) in runs(&view) {
            self.stretch(&view, place, count, &mut all)?;
        }
        Ok(all)
    }

    /// All elements as integers, row by row.
    pub(crate) fn whole(&self, i: usize) -> Done<Vec<i64>> {
        let view = self.view(i);
        let mut all = Vec::with_capacity(view.count());
        for (place, count) in runs(&view) {
            whole_stretch(self.memory, &view, place, count, &mut all)?;
        }
        Ok(all)
    }

    /// Stores consecutive elements.
    pub(crate) fn put(&mut self, view: &View, place: usize, values: &[f32]) -> Done {
        let bits = view.elem.bits();
        let raw = self.memory.bytes_mut(view.address + place * bits / 8, values.len() * bits / 8)?;
        #[allow(clippy::cast_possible_truncation)]
        match view.elem {
            Elem::F32 => fill(raw, values, f32::to_le_bytes),
            Elem::F16 => fill(raw, values, |v| f16::from_f32(v).to_le_bytes()),
            Elem::BF16 => fill(raw, values, |v| bf16::from_f32(v).to_le_bytes()),
            Elem::I8 => fill(raw, values, |v| (v as i8).to_le_bytes()),
            Elem::U8 => fill(raw, values, |v| (v as u8).to_le_bytes()),
            Elem::Bool => fill(raw, values, |v| [u8::from(v != 0.0)]),
            Elem::I32 => fill(raw, values, |v| (v as i32).to_le_bytes()),
            Elem::I64 => fill(raw, values, |v| (v as i64).to_le_bytes()),
            Elem::I4 => {}
        }
        Ok(())
    }

    /// Stores all elements, row by row.
    pub(crate) fn store(&mut self, i: usize, values: &[f32]) -> Done {
        let view = self.view(i);
        let mut rest = values;
        for (place, count) in runs(&view) {
            let (now, later) = rest.split_at(count);
            self.put(&view, place, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Stores integers exactly.
    pub(crate) fn store_whole(&mut self, i: usize, values: &[i64]) -> Done {
        let view = self.view(i);
        let mut rest = values;
        for (place, count) in runs(&view) {
            let (now, later) = rest.split_at(count);
            rest = later;
            let bits = view.elem.bits();
            let raw = self.memory.bytes_mut(view.address + place * bits / 8, count * bits / 8)?;
            #[allow(clippy::cast_possible_truncation)]
            match view.elem {
                Elem::I64 => fill(raw, now, i64::to_le_bytes),
                Elem::I32 => fill(raw, now, |v| (v as i32).to_le_bytes()),
                Elem::I8 | Elem::U8 | Elem::Bool => fill(raw, now, |v| [v as u8]),
                _ => {
                    let floats: Vec<f32> = now.iter().map(|&v| v as f32).collect();
                    self.put(&view, place, &floats)?;
                }
            }
        }
        Ok(())
    }
}

fn fill<T: Copy, const N: usize>(raw: &mut [u8], values: &[T], bytes: impl Fn(T) -> [u8; N]) {
    for (place, &value) in raw.chunks_exact_mut(N).zip(values) {
        place.copy_from_slice(&bytes(value));
    }
}

/// Contiguous runs of storage that make up a view, in order: one if there are no gaps, else one per row or per element.
fn runs(view: &View) -> Vec<(usize, usize)> {
    let count = view.count();
    if view.is_contiguous() {
        return vec![(view.offset, count)];
    }
    let length = if view.strides.last() == Some(&1) { view.cols() } else { 1 };
    (0..count / length).map(|run| (view.place(run * length), length)).collect()
}

/// Bytes of `count` consecutive elements of the storage.
fn raw<'m>(memory: &'m DeviceMemory, view: &View, place: usize, count: usize) -> Done<&'m [u8]> {
    let bits = view.elem.bits();
    memory.bytes(view.address + place * bits / 8, (count * bits).div_ceil(8))
}

/// Appends `count` consecutive elements of the storage, starting at a place, to `into`.
pub(crate) fn stretch(memory: &DeviceMemory, view: &View, place: usize, count: usize, into: &mut Vec<f32>) -> Done {
    let raw = raw(memory, view, place, count)?;
    match view.elem {
        Elem::F32 => into.extend(raw.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        Elem::F16 => into.extend(raw.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())),
        Elem::BF16 => into.extend(raw.chunks_exact(2).map(|b| f32::from_bits(u32::from_le_bytes([0, 0, b[0], b[1]])))),
        Elem::I8 => into.extend(raw.iter().map(|&b| f32::from(b.cast_signed()))),
        Elem::I4 if place.is_multiple_of(2) => {
            let halves = raw.iter().flat_map(|&b| [b << 4, b & 0xF0]);
            into.extend(halves.take(count).map(|half| f32::from(half.cast_signed() >> 4)));
        }
        _ => {
            let mut whole = Vec::with_capacity(count);
            whole_stretch(memory, view, place, count, &mut whole)?;
            into.extend(whole.into_iter().map(|value| value as f32));
        }
    }
    Ok(())
}

fn whole_stretch(memory: &DeviceMemory, view: &View, place: usize, count: usize, into: &mut Vec<i64>) -> Done {
    let raw = raw(memory, view, place, count)?;
    match view.elem {
        Elem::I8 => into.extend(raw.iter().map(|&b| i64::from(b.cast_signed()))),
        Elem::U8 | Elem::Bool => into.extend(raw.iter().map(|&b| i64::from(b))),
        Elem::I32 => {
            into.extend(raw.chunks_exact(4).map(|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]]))));
        }
        Elem::I64 => into.extend(raw.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap_or_default()))),
        Elem::I4 => into.extend((0..count).map(|i| {
            let byte = raw[i / 2 + place % 2 * (i % 2)];
            let half = if (place + i).is_multiple_of(2) { byte << 4 } else { byte & 0xF0 };
            i64::from(half.cast_signed() >> 4)
        })),
        Elem::F32 | Elem::F16 | Elem::BF16 => {
            let mut floats = Vec::with_capacity(count);
            stretch(memory, view, place, count, &mut floats)?;
            #[allow(clippy::cast_possible_truncation)]
            into.extend(floats.into_iter().map(|value| value as i64));
        }
    }
    Ok(())
}

//! `libnnopbase`: descriptors and executors.

#![allow(unsafe_code, non_snake_case)]

use crate::codes::OP_INVALID;
use crate::control;
use crate::control::Note;
use crate::executor::{self, Place};
use crate::ffi::{In, call, plain};
use crate::registry::Handle;
use crate::tensor::{self, Elem, INT_ARRAYS, LISTS, SCALARS, TENSORS};
use half::{bf16, f16};
use std::sync::Arc;

/// Runs a call that returns a handle, or null on failure.
fn made(name: &'static str, make: impl FnOnce() -> Option<Handle>) -> Handle {
    let mut handle = 0;
    plain(name, || match make() {
        Some(new) => {
            handle = new;
            Ok(())
        }
        None => crate::codes::fail!(OP_INVALID, "the description is not valid"),
    });
    handle
}

#[unsafe(no_mangle)]
pub extern "C" fn aclCreateTensor(
    dims: In<i64>,
    rank: u64,
    dtype: i32,
    strides: In<i64>,
    offset: i64,
    format: i32,
    storage: In<i64>,
    storage_rank: u64,
    data: usize,
) -> Handle {
    made("aclCreateTensor", || {
        let (dims, strides, storage) = (dims.values(rank)?, strides.values(rank)?, storage.values(storage_rank)?);
        tensor::describe(&dims, dtype, &strides, offset, format, &storage, data)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyTensor(handle: Handle) -> i32 {
    plain("aclDestroyTensor", || TENSORS.remove(handle, OP_INVALID).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclCreateScalar(value: In<u8>, dtype: i32) -> Handle {
    made("aclCreateScalar", || {
        let elem = Elem::from_code(dtype)?;
        let bytes = value.values(elem.bits() as u64 / 8)?;
        let number = match elem {
            Elem::F32 => f64::from(f32::from_le_bytes(bytes.try_into().ok()?)),
            Elem::F16 => f16::from_le_bytes(bytes.try_into().ok()?).to_f64(),
            Elem::BF16 => bf16::from_le_bytes(bytes.try_into().ok()?).to_f64(),
            Elem::I32 => f64::from(i32::from_le_bytes(bytes.try_into().ok()?)),
            Elem::I64 => i64::from_le_bytes(bytes.try_into().ok()?) as f64,
            _ => return None,
        };
        Some(SCALARS.add(Arc::new(number)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyScalar(handle: Handle) -> i32 {
    plain("aclDestroyScalar", || SCALARS.remove(handle, OP_INVALID).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclCreateIntArray(values: In<i64>, count: u64) -> Handle {
    made("aclCreateIntArray", || Some(INT_ARRAYS.add(Arc::new(values.values(count)?))))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyIntArray(handle: Handle) -> i32 {
    plain("aclDestroyIntArray", || INT_ARRAYS.remove(handle, OP_INVALID).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclCreateTensorList(members: In<Handle>, count: u64) -> Handle {
    made("aclCreateTensorList", || Some(LISTS.add(Arc::new(members.values(count)?))))
}

/// Also destroys the elements of the list.
#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyTensorList(handle: Handle) -> i32 {
    plain("aclDestroyTensorList", || {
        if handle == 0 {
            return Ok(());
        }
        for &member in LISTS.remove(handle, OP_INVALID)?.iter() {
            if TENSORS.remove(member, OP_INVALID).is_err() {
                control::complain("a member of a tensor list was destroyed before the list: a double free");
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclSetAclOpExecutorRepeatable(handle: Handle) -> i32 {
    plain("aclSetAclOpExecutorRepeatable", || executor::make_repeatable(handle))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyAclOpExecutor(handle: Handle) -> i32 {
    plain("aclDestroyAclOpExecutor", || executor::destroy(handle))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclSetInputTensorAddr(handle: Handle, index: usize, tensor: Handle, address: usize) -> i32 {
    plain("aclSetInputTensorAddr", || executor::rebind(handle, Place::Input(index), Some(tensor), address))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclSetOutputTensorAddr(handle: Handle, index: usize, tensor: Handle, address: usize) -> i32 {
    plain("aclSetOutputTensorAddr", || executor::rebind(handle, Place::Output(index), Some(tensor), address))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclSetDynamicInputTensorAddr(
    handle: Handle,
    index: usize,
    member: usize,
    list: Handle,
    address: usize,
) -> i32 {
    let note = Note { kind: "list", bytes: member as u64 };
    call("aclSetDynamicInputTensorAddr", note, || {
        LISTS.get(list, OP_INVALID)?;
        executor::rebind(handle, Place::Listed(index), None, address)
    })
}

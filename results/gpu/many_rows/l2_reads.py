import sys, ctypes
from pathlib import Path
from cuda.bindings import nvrtc
def comp(path):
    e,p=nvrtc.nvrtcCreateProgram(Path(path).read_bytes(),b"mb",0,[],[])
    o=[b"-arch=sm_90a",b"-std=c++17",b"--ptxas-options=-v"]
    e,=nvrtc.nvrtcCompileProgram(p,len(o),o)
    _,n=nvrtc.nvrtcGetProgramLogSize(p); log=b" "*n; nvrtc.nvrtcGetProgramLog(p,log)
    if int(e): print(log.decode()[:3000]); sys.exit(1)
    _,n=nvrtc.nvrtcGetCUBINSize(p); b=b" "*n; nvrtc.nvrtcGetCUBIN(p,b); return b
cub=comp(sys.argv[1])
if len(sys.argv)>2:
    import torch, numpy as np
    from cuda.bindings import driver as dr
    torch.cuda.init(); torch.zeros(1,device='cuda'); print(torch.cuda.get_device_name(0))
    e,m=dr.cuModuleLoadData(cub); assert int(e)==0,e
    X=torch.zeros(65536,dtype=torch.int8,device='cuda'); W=torch.zeros(1<<28,dtype=torch.int8,device='cuda')
    smem=200*1024; R=210
    for bg in (0,1):
      for n in '0123456789':
        e,f=dr.cuModuleGetFunction(m,('k'+n).encode()); assert int(e)==0,(n,e)
        dr.cuFuncSetAttribute(f,dr.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,smem)
        t=torch.zeros(264,dtype=torch.int64,device='cuda')
        for _ in range(2):
            c=torch.zeros(1,dtype=torch.int32,device='cuda')
            args=((X.data_ptr(),c.data_ptr(),t.data_ptr(),W.data_ptr(),R,bg),(ctypes.c_void_p,)*4+(ctypes.c_int,)*2)
            e,=dr.cuLaunchKernel(f,132,1,1,288,1,1,smem,0,args,0); assert int(e)==0,e
            torch.cuda.synchronize()
        v=t.cpu().numpy().reshape(132,2)/(R-10)
        print('bg',bg,'mode',n,'cycles: median %.0f max %.0f; first batch %.0f'%(np.median(v[:,0]),v[:,0].max(),np.median(v[:,1])),flush=True)

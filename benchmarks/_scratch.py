
import sys; sys.path.insert(0,"benchmarks")
import torch, pathlib, kernels_h200 as kb
from ddtree.kernels import tree_build_cuda as tb, cuda_module as cm, top_log_probs_cuda as tl
cm._SOURCES=pathlib.Path("benchmarks")
real=cm.cuda_module
tb.cuda_module=lambda s,d,**k: real("_dbg.cu",d,**k)
tl.cuda_module=lambda s,d,**k: real("_dbgtop.cu",d,**k)
D=torch.device("cuda")
for b in (8,16,64,128,256,1024):
    lp,ids=kb.draw_log_probs(1,15,min(b,64))
    for _ in range(3): t=tb.build_tree(lp,ids,torch.zeros(1,dtype=torch.int64,device=D),b,torch.full((1,),15,device=D))
    print("build",b,"load,dp,collect,sort,out,n,bound",[round(x,1) for x in t.scores[0,:7].tolist()])
for v in (49152,151936):
    lg=torch.randn(1,15,v,device=D)*3
    for _ in range(3): a,_i=tl.top_log_probs(lg,64)
    print("top",v,"load,lse,kth,select,arrive,kth2,select2",a[0,3,:7].tolist())
